"""KVFlowReceiver: the decode side of one request, with a load for each pool. Loads start once the pages are known.

SGLang's scheduler thread makes all calls. `poll` returns Success only when no further byte can land in the pages. It
returns Failed once the loads have ended, which unfinished reads delay by at most `Config.cancel_grace_s`. If reads go
on after that, or if another rank has failed earlier, SGLang's deferred release keeps the pages until the reads have
stopped (`KVFlowManager.hold`).
"""

from __future__ import annotations

import time
import weakref
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from kvflow.blocking import Load
from kvflow.checks import counted, error_text, printable
from kvflow.core.protocol.prompts import prompt_digest
from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.errors import KVFlowError, PeerError, PeerIncompatible, PeerUnreachable, RequestError
from kvflow.runtime.load.requests import LoadRequest
from kvflow.sglang.bootstrap import INTRODUCTION
from kvflow.sglang.rooms import REASON_CHARS_MAX, Room, RoomMessage, room_problem
from kvflow.sglang.sender import failure


class KVFlowReceiver(CommonKVReceiver):
    """kvflow's KV receiver. On each rank of a decode server, SGLang creates one for each request."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.prompt: Any = None
        """Token ids of the prompt, set by a hook (`hooks`); None if they are not known."""
        self._loads: list[Load] = []
        self._aux_index = 0
        self._cancelled = False
        self.abort_notified = False
        room = Room(bootstrap_room or 0)
        self._name = mgr.new_request_name(room)
        super().__init__(mgr, bootstrap_addr, room)
        self.bootstrap_infos: Any = None
        mgr.receivers[room] = self
        weakref.finalize(self, mgr.forget, room).atexit = False
        problem, incompatible_error = room_problem(room), mgr.incompatible_error(bootstrap_addr)
        if problem:
            self.refuse(RequestError(problem))
        elif incompatible_error is not None:
            self.refuse(incompatible_error)

    def init(self, prefill_dp_rank: int) -> None:
        """Look up all prefill ranks of the data-parallel replica `prefill_dp_rank`, and begin to connect to them.

        If the bootstrap server's tickets for these ranks are invalid, fail this request, not the scheduler.
        """
        try:
            super().init(prefill_dp_rank)
        except (RequestError, TypeError, LookupError, AttributeError) as error:  # tickets of another version, or forged
            self.invalidate_cached_bootstrap_infos()
            text = f"prefill server {self.bootstrap_addr}: its introduction cannot be read: {error_text(error)}"
            self.refuse(PeerIncompatible(text, peer=self.bootstrap_addr))
        except KVFlowError as error:
            self.refuse(error)

    def refuse(self, error: KVFlowError) -> None:
        """Fail the request with `error`, and notify the prefill server. Only for a request that has no loads yet."""
        self._fail(error)
        self.conclude_state = KVPoll.Failed

    def _register_kv_args(self) -> bool:
        """Begin to connect to the prefill ranks, in the background, so that loads find a connection. Return True.

        If the prefill ranks' pools are incompatible with this rank's pools, fail the request and return False.
        """
        problem = self._incompatibility()
        if problem is not None:
            text = f"prefill server {self.bootstrap_addr}: {problem}"
            self.refuse(PeerIncompatible(text, peer=self.bootstrap_addr))
            return False
        tickets = [self._introduction(pool_index) for pool_index in range(len(self.kv_mgr.pools))]
        for pool, ticket in zip(self.kv_mgr.pools, tickets, strict=True):
            pool.runtime.start(lambda runtime, ticket=ticket: runtime.prewarm([ticket]))
        return True

    def _incompatibility(self) -> str | None:
        """Return why this decode server cannot read the prefill server's pools; None if it can.

        Compare the numbers of pools, and where it matters, the tensor-parallel sizes.
        """
        pools = self.kv_mgr.pools
        for info in self.bootstrap_infos:
            count = len(info.get(INTRODUCTION, ()))
            if not count:
                return "its transfer backend is not kvflow"
            if count != len(pools):
                return f"it has {counted(count, 'pool')}, this decode server has {len(pools)}: {_pool_names(pools)}"
        our_size, their_size = self.kv_mgr.attn_tp_size, self.prefill_info.attn_tp_size
        shares = [pool for pool in pools if pool.buffers.rank_private]
        if shares and our_size != their_size:
            return f"its tensor parallelism is {their_size}, ours {our_size}; {_pool_names(shares)} need the same"
        return None

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **others: Any,
    ) -> None:
        """Send the prefill ranks a message about the request, and start the request's loads.

        SGLang calls this when it knows the pages to load into: `kv_indices` in the KV pool, `state_indices` in each
        component of state, `aux_index` in the metadata. This decode server already has the first `decode_prefix_len`
        tokens.
        """
        self._aux_index = aux_index or 0
        if self.conclude_state is not None:
            return
        if not self.bootstrap_infos or not all(
            map(partial(self._send_room_message, decode_prefix_len or 0), self.bootstrap_infos)
        ):
            self.invalidate_cached_bootstrap_infos()
            return
        self.init_time = time.time()
        items = self.kv_mgr.items_of(kv_indices, state_indices, self._aux_index, decode_prefix_len or 0)
        for pool_index, (pool, indexes) in enumerate(zip(self.kv_mgr.pools, items, strict=True)):
            if pool_index == 0 or (indexes is not None and len(indexes)):
                self._load(pool_index, pool, list(indexes))

    def _send_room_message(self, decode_prefix_len: int, info: dict[str, Any]) -> bool:
        """Send a prefill rank a `RoomMessage` about the request, and return True.

        If the message cannot be sent, return False; SGLang's own code then fails the request. `info` is the bootstrap
        server's description of the rank.
        """
        message = self._room_message(
            decode_prefix_len=decode_prefix_len,
            is_dummy=info is not self._uncut_rank,
            prompt=self._digest,
            prompt_tokens=0 if self.prompt is None else len(self.prompt),
        )
        frames = message.frames()
        sent: bool = self._send_bootstrap_message(bootstrap_info=info, message=frames, operation="send_metadata")
        return sent

    def _room_message(self, **what: Any) -> RoomMessage:
        return RoomMessage(
            room=int(self.bootstrap_room),
            name=self._name,
            reader=f"{self.kv_mgr.public_id}.{self.kv_mgr.attn_tp_rank}",
            readers=getattr(self, "required_dst_info_num", None) or 1,
            **what,
        )

    def _load(self, pool_index: int, pool: Any, items: Any) -> None:
        patience_s = float(self.kv_mgr.waiting_timeout)
        ticket = Ticket.rendezvous(self._introduction(pool_index), self._name, ttl_s=patience_s)
        tokens = len(items) * pool.buffers.tokens
        request = LoadRequest(self._name, ticket, items, deadline_s=patience_s, num_tokens=tokens)
        self._loads.append(pool.runtime.start_load(request))

    def _introduction(self, pool_index: int) -> Ticket:
        ranks = self.bootstrap_infos if self.kv_mgr.pools[pool_index].buffers.cut else [self._uncut_rank]
        return merge_tickets([Ticket.from_params(rank[INTRODUCTION][pool_index]) for rank in ranks])

    @property
    def _digest(self) -> str:
        """Digest of the prompt's token ids, for comparison by the prefill server; "" if the ids are not known."""
        return "" if self.prompt is None else prompt_digest(self._name, self.prompt)

    @property
    def _uncut_rank(self) -> dict[str, Any]:
        """Bootstrap server's description of the one prefill rank that this rank reads whole items from.

        Pools with `Buffers.cut` False are read whole.
        """
        return next(info for info in self.bootstrap_infos if not info["is_dummy"])

    def _poll(self) -> Any:
        """Return SGLang's state of the request (a KVPoll). Never block: take results only from loads that are done."""
        if self.conclude_state is None and self._loads:
            failed = self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed
            if failed or any(map(_error_of, self._loads)):
                self._cancel()
            if not all(load.done for load in self._loads):
                return KVPoll.Transferring
            if not failed:
                self._set_final_state()
        return super()._poll()

    def _set_final_state(self) -> None:
        """Set the request's final state, after all its loads have ended.

        If all have succeeded, write the received metadata to SGLang's buffers and set Success, else set Failed.
        """
        errors = [error for error in map(_error_of, self._loads) if error is not None]
        if not errors:
            try:
                payload = self._loads[0].result(0).payload
                if not self.kv_mgr.aux_moves:
                    self.kv_mgr.aux.write_row(self._aux_index, payload)
            except KVFlowError as error:
                errors.append(error)
        if errors:
            self._fail(next((error for error in errors if isinstance(error, KVFlowError)), errors[0]))
        else:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)

    def _fail(self, error: BaseException) -> None:
        self.kv_mgr.fail(self.bootstrap_room, f"{type(error).__name__}: {error}")
        self._notify_prefill(error)

    def _notify_prefill(self, error: BaseException) -> None:
        """Notify the prefill server that this server has given up the request.

        If `error` is a PeerError, the prefill server may be gone or restarted: forget that server, so that the next
        request looks it up again.
        """
        self.ensure_abort_notified()
        if isinstance(error, PeerError):
            self.invalidate_cached_bootstrap_infos()
            self.kv_mgr.prefill_info_table.pop(self.bootstrap_addr, None)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Notify the prefill ranks that this server has given up the request, and why. Skip unreachable ranks.

        A second call does nothing.
        """
        if self.abort_notified:
            return
        self.abort_notified = True
        if room_problem(self.bootstrap_room):
            return
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "") or "another rank has failed"
        reason = printable(reason.removeprefix("kvflow: "), REASON_CHARS_MAX) or "it does not say why"
        self.kv_mgr.notify_given_up(self.bootstrap_addr, self.bootstrap_infos, self._room_message(given_up=reason))

    def abort(self) -> None:
        """Abort the request and cancel its loads.

        The request has no final state until its loads have ended. Until then SGLang keeps the request's pages.
        """
        if (
            self.conclude_state is None
            and self.bootstrap_infos is None
            and self.kv_mgr.has_not_answered(self.bootstrap_addr)
        ):
            text = f"prefill server {self.bootstrap_addr} does not answer"
            self.refuse(PeerUnreachable(text, peer=self.bootstrap_addr))
        super().abort()
        self._cancel()
        if not all(load.done for load in self._loads):
            self.conclude_state = None

    def clear(self) -> None:
        """Forget the request, as SGLang's own receiver does, and cancel its loads.

        `KVFlowManager.hold` then keeps the pages to which loads may still write.
        """
        self._cancel()
        unsafe, self._loads = [load for load in self._loads if not load.safe], []
        if unsafe:
            self.kv_mgr.hold(self.bootstrap_room, self.bootstrap_addr, unsafe)
        super().clear()
        self.kv_mgr.forget(self.bootstrap_room)

    def failure_exception(self) -> None:
        """Forget the request, and raise the error that SGLang's client gets."""
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "")
        self.ensure_abort_notified()
        self.conclude_state = KVPoll.Failed
        self.clear()
        raise failure(self.bootstrap_room, reason)

    def _cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            for load in self._loads:
                load.cancel()


def _pool_names(pools: list[Any]) -> str:
    return ", ".join(pool.buffers.name for pool in pools)


def _error_of(load: Load) -> BaseException | None:
    """Return the error of a failed or cancelled `load`; None if it has succeeded or still runs."""
    if not load.done:
        return None
    try:
        load.result(0)
    except (KVFlowError, CancelledError) as error:
        return error
    return None
