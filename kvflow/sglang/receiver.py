"""The decode side of one request: a load for each pool, started as soon as the pages are known.

The scheduler's thread calls all of this. `poll` says Success only when no byte can land in the pages any more. It says
Failed once the loads have ended, which no read can hold up for longer than `Config.cancel_grace_s`; where reads have
not stopped by then, or another rank has failed earlier, SGLang's deferred release keeps the pages until they have
(`KVFlowManager.hold`).
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
from kvflow.checks import counted, printable, said
from kvflow.core.protocol.prompts import prompt_digest
from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.errors import KVFlowError, PeerError, PeerIncompatible, PeerUnreachable, RequestError
from kvflow.runtime.load.requests import LoadRequest
from kvflow.sglang.bootstrap import INTRODUCTION
from kvflow.sglang.rooms import REASON_CHARS_MAX, Room, Wanted, room_problem
from kvflow.sglang.sender import failure


class KVFlowReceiver(CommonKVReceiver):
    """The receiver that SGLang makes for each request of a decode server."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.prompt: Any = None
        """Tokens of the prompt, where SGLang's scheduler has told them (`hooks`)."""
        self._loads: list[Load] = []
        self._aux_index = 0
        self._cancelled = False
        self.abort_notified = False
        room = Room(bootstrap_room or 0)
        self._name = mgr.name_of(room)
        super().__init__(mgr, bootstrap_addr, room)
        self.bootstrap_infos: Any = None
        mgr.receivers[room] = self
        weakref.finalize(self, mgr.forget, room).atexit = False
        problem, unfit = room_problem(room), mgr.unfit(bootstrap_addr)
        if problem:
            self.refuse(RequestError(problem))
        elif unfit is not None:
            self.refuse(unfit)

    def init(self, prefill_dp_rank: int) -> None:
        """Find the prefill ranks. What cannot be right about them is this request's failure."""
        try:
            super().init(prefill_dp_rank)
        except (RequestError, TypeError, LookupError, AttributeError) as error:  # of another version, or forged
            self.invalidate_cached_bootstrap_infos()
            text = f"prefill server {self.bootstrap_addr}: its introduction cannot be read: {said(error)}"
            self.refuse(PeerIncompatible(text, peer=self.bootstrap_addr))
        except KVFlowError as error:
            self.refuse(error)

    def refuse(self, error: KVFlowError) -> None:
        """Fail before anything was read."""
        self._fail(error)
        self.conclude_state = KVPoll.Failed

    def _register_kv_args(self) -> bool:
        """Connect to the prefill ranks, which are known since now, so that the first request need not.

        False if their pools cannot go into ours: the request has failed then.
        """
        problem = self._problem()
        if problem is not None:
            text = f"prefill server {self.bootstrap_addr}: {problem}"
            self.refuse(PeerIncompatible(text, peer=self.bootstrap_addr))
            return False
        tickets = [self._introduction(at) for at in range(len(self.kv_mgr.pools))]
        for pool, ticket in zip(self.kv_mgr.pools, tickets, strict=True):
            pool.runtime.start(lambda runtime, ticket=ticket: runtime.prewarm([ticket]))
        return True

    def _problem(self) -> str | None:
        """The reason why the prefill server's pools do not go with ours, as far as can be seen before any question."""
        pools = self.kv_mgr.pools
        for info in self.bootstrap_infos:
            theirs = len(info.get(INTRODUCTION, ()))
            if not theirs:
                return "its transfer backend is not kvflow"
            if theirs != len(pools):
                return f"it has {counted(theirs, 'pool')}, this decode server has {len(pools)}: {_names(pools)}"
        ours, theirs = self.kv_mgr.attn_tp_size, self.prefill_info.attn_tp_size
        shares = [pool for pool in pools if pool.buffers.shared_out]
        if shares and ours != theirs:
            return f"its tensor parallelism is {theirs}, ours {ours}; {_names(shares)} cannot be cut for another one"
        return None

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **others: Any,
    ) -> None:
        """Tell the prefill ranks how much is wanted, now that the pages are there, and start to read."""
        self._aux_index = aux_index or 0
        if self.conclude_state is not None:
            return
        if not self.bootstrap_infos or not all(map(partial(self._want, decode_prefix_len or 0), self.bootstrap_infos)):
            self.invalidate_cached_bootstrap_infos()
            return
        self.init_time = time.time()
        items = self.kv_mgr.items_of(kv_indices, state_indices, self._aux_index, decode_prefix_len or 0)
        for at, (pool, wanted) in enumerate(zip(self.kv_mgr.pools, items, strict=True)):
            if at == 0 or (wanted is not None and len(wanted)):
                self._load(at, pool, list(wanted))

    def _want(self, decode_prefix_len: int, info: dict[str, Any]) -> bool:
        """Tell one prefill rank; SGLang's own failure if it cannot be told."""
        wanted = self._message(
            decode_prefix_len=decode_prefix_len,
            is_dummy=info is not self._whole,
            prompt=self._digest,
            prompt_tokens=0 if self.prompt is None else len(self.prompt),
        )
        frames = wanted.frames()
        told: bool = self._send_bootstrap_message(bootstrap_info=info, message=frames, operation="send_metadata")
        return told

    def _message(self, **what: Any) -> Wanted:
        return Wanted(
            room=int(self.bootstrap_room),
            name=self._name,
            reader=f"{self.kv_mgr.secret[:16]}.{self.kv_mgr.attn_tp_rank}",
            readers=getattr(self, "required_dst_info_num", None) or 1,
            **what,
        )

    def _load(self, at: int, pool: Any, items: Any) -> None:
        patience_s = float(self.kv_mgr.waiting_timeout)
        ticket = Ticket.rendezvous(self._introduction(at), self._name, ttl_s=patience_s)
        tokens = len(items) * pool.buffers.tokens
        request = LoadRequest(self._name, ticket, items, deadline_s=patience_s, num_tokens=tokens)
        self._loads.append(pool.runtime.start_load(request))

    def _introduction(self, at: int) -> Ticket:
        ranks = self.bootstrap_infos if self.kv_mgr.pools[at].buffers.cut else [self._whole]
        return merge_tickets([Ticket.from_params(rank[INTRODUCTION][at]) for rank in ranks])

    @property
    def _digest(self) -> str:
        """Digest of the prompt for the prefill server; "" if it is not known."""
        return "" if self.prompt is None else prompt_digest(self._name, self.prompt)

    @property
    def _whole(self) -> dict[str, Any]:
        """The prefill rank that is read where pools are not cut."""
        return next(info for info in self.bootstrap_infos if not info["is_dummy"])

    def _poll(self) -> Any:
        """Tell the state; never blocks, since it is known which loads are over."""
        if self.conclude_state is None and self._loads:
            failed = self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed
            if failed or any(map(_error_of, self._loads)):
                self._cancel()
            if not all(load.done for load in self._loads):
                return KVPoll.Transferring
            if not failed:
                self._judge()
        return super()._poll()

    def _judge(self) -> None:
        """Conclude, once all loads are over and no byte can land any more."""
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
        self._tell_prefill(error)

    def _tell_prefill(self, error: BaseException) -> None:
        """Tell the prefill server that nobody reads what it offers.

        One that is gone, or has restarted, is asked for anew by the next request.
        """
        self.ensure_abort_notified()
        if isinstance(error, PeerError):
            self.invalidate_cached_bootstrap_infos()
            self.kv_mgr.prefill_info_table.pop(self.bootstrap_addr, None)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Tell the prefill ranks once why the request was given up, as far as they can be reached."""
        if self.abort_notified:
            return
        self.abort_notified = True
        if room_problem(self.bootstrap_room):
            return
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "") or "another rank has failed"
        reason = printable(reason.removeprefix("kvflow: "), REASON_CHARS_MAX) or "it does not say why"
        self.kv_mgr.tell(self.bootstrap_addr, self.bootstrap_infos, self._message(given_up=reason))

    def abort(self) -> None:
        """End it. Pages in which bytes may still land are kept by `KVFlowManager.hold`."""
        if self.conclude_state is None and self.bootstrap_infos is None and self.kv_mgr.is_silent(self.bootstrap_addr):
            text = f"prefill server {self.bootstrap_addr} does not answer"
            self.refuse(PeerUnreachable(text, peer=self.bootstrap_addr))
        super().abort()
        self._cancel()
        if not all(load.done for load in self._loads):
            self.conclude_state = None

    def clear(self) -> None:
        """Forget the request, as SGLang does. A load that goes on is kvflow's to end."""
        self._cancel()
        unsafe, self._loads = [load for load in self._loads if not load.safe], []
        if unsafe:
            self.kv_mgr.hold(self.bootstrap_room, self.bootstrap_addr, unsafe)
        super().clear()
        self.kv_mgr.forget(self.bootstrap_room)

    def failure_exception(self) -> None:
        """Raise what SGLang tells the client, and forget the request."""
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


def _names(pools: list[Any]) -> str:
    return ", ".join(pool.buffers.name for pool in pools)


def _error_of(load: Load) -> BaseException | None:
    """Failure of a load; None of one that has not failed, or not yet."""
    if not load.done:
        return None
    try:
        load.result(0)
    except (KVFlowError, CancelledError) as error:
        return error
    return None
