"""KVFlowSender: the prefill side of one request, with a lease that grows with each chunk that the scheduler sends.

SGLang's scheduler thread makes all calls. `poll` returns Success or Failed only after the leases have ended; then
SGLang may reuse the request's pages. After an `abort` in the middle of a prefill, SGLang frees the pages at once, but
no load can succeed, since each load waits for the lease's payload (`Lease.complete`).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError

from kvflow.blocking import Lease
from kvflow.checks import counted
from kvflow.core.protocol.prompts import prompt_digest
from kvflow.errors import KVFlowError
from kvflow.runtime.producer.lease import LeaseOutcome, ServeRequest
from kvflow.sglang.rooms import Room, RoomMessage, room_problem


class KVFlowSender(CommonKVSender):
    """kvflow's KV sender. On each rank of a prefill server, SGLang creates one for each request."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **named: Any) -> None:
        self.prompt: Any = None
        """Token ids of the prompt, set by a hook (`hooks`); None if they are not known."""
        self._leases: list[Lease] = []
        self._all_offered = False
        self._gave_up = False
        self._early_send_wait_event: Any = None
        room, problem = Room(bootstrap_room), room_problem(bootstrap_room)
        self._answer = mgr.add_sender(room, self)
        super().__init__(mgr, bootstrap_addr, room, *args, **named)
        # SGLang drops some requests that it has aborted without a `clear`.
        weakref.finalize(self, _forget_dropped, mgr, room, self._answer).atexit = False
        if problem:
            self._fail(problem)

    def pop_decode_prefix_len(self) -> int:
        """Return how many prompt tokens the decode server already has; 0 before that server's message arrives."""
        message = self._first_message()
        return 0 if message is None else message.decode_prefix_len

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Open the request's lease for `num_kv_indices` KV pages, which `send` adds chunk by chunk.

        SGLang calls this once the decode server's messages have arrived. `aux_index` is the row of SGLang's metadata.
        """
        super().init(num_kv_indices, aux_index)
        pool = self.kv_mgr.pools[0]
        tokens = num_kv_indices * pool.buffers.tokens
        self._offer(0, [], tokens, computed_tokens=0, extends=True, payload=True)

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, **events: Any) -> None:
        """Offer the KV pages `kv_indices` of one chunk of the prompt to readers.

        The pages are computed once the device event of the chunk, if there is one, has happened.
        """
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed) or not self._leases or self._gave_up:
            return
        kv_indices, _, is_last, skip = self._prepare_send_indices(kv_indices, state_indices)
        if skip:
            return
        ready, self._early_send_wait_event = self._early_send_wait_event, None
        self._record_transfer_indices(kv_indices, state_indices)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Transferring)
        try:
            self._grow(kv_indices, ready)
            if is_last:
                self._complete_offer(state_indices, ready)
        except (KVFlowError, TimeoutError) as error:
            self._fail(f"it could not be offered: {error}")

    def _grow(self, pages: Any, ready: Any) -> None:
        lease, page_size = self._leases[0], self.kv_mgr.pools[0].buffers.tokens
        if len(pages):
            lease.extend(pages.tolist())
            if self.curr_idx < self.num_kv_indices:
                lease.advance(self.curr_idx * page_size, ready)

    def _complete_offer(self, state_indices: Any, ready: Any) -> None:
        """After the last chunk, offer the request's items in the other pools, and complete the lease with the metadata.

        The device event `ready` happens when the last chunk is computed. None means that the chunk is already computed.
        """
        prefix_len = self.pop_decode_prefix_len()
        for pool_index, items in enumerate(self.kv_mgr.items_of((), state_indices, self.aux_index, prefix_len)):
            if items is not None and len(items):
                self._offer(pool_index, list(items), len(items) * self.kv_mgr.pools[pool_index].buffers.tokens)
        self._leases[0].complete(b"." if self.kv_mgr.aux_moves else self.kv_mgr.aux.read_row(self.aux_index), ready)
        self._all_offered = True

    def _offer(self, pool_index: int, blocks: Any, tokens: int, **how: Any) -> None:
        message = self._first_message()
        if message is None:
            self._fail(self._given_up_text())
            return
        pool = self.kv_mgr.pools[pool_index]
        if not pool.buffers.cut and message.is_dummy:
            return
        readers = 1 if pool.buffers.cut else message.readers
        request = ServeRequest(message.name, blocks, tokens, reader_count=readers, **how)
        try:
            self._leases.append(pool.runtime.serve_blocks(request))
        except (KVFlowError, TimeoutError) as error:
            self._fail(f"it could not be offered: {error}")

    def _first_message(self) -> RoomMessage | None:
        """Return the first message about the request from a decode rank.

        None if none has arrived yet, or if the decode server has given up the request.
        """
        request = self._answer.request
        return None if request is None or request.given_up else request.first_message

    def _given_up_text(self) -> str:
        request = self._answer.request
        reason = request.given_up if request is not None else ""
        return f"the decode server has aborted the request: {reason or 'it does not say why'}"

    def _poll_with_status(self, check_status: Any) -> Any:
        """Return SGLang's state of the request (a KVPoll), without waiting for leases to end.

        If the request has failed, this method fails its leases, which may block for a moment.
        """
        if self.conclude_state is None:
            failed = self._update_state()
            if failed:
                self._give_up("the prefill server has given the request up")
            if not all(lease.done for lease in self._leases):
                return KVPoll.Transferring if failed or self._all_offered else super()._poll_with_status(check_status)
            if self._leases and not failed:
                self._set_final_state()
        return super()._poll_with_status(check_status)

    def _update_state(self) -> bool:
        """Update the request's state from the decode ranks' messages. Return True if the request has failed."""
        status, request = self.kv_mgr.check_status(self.bootstrap_room), self._answer.request
        if status in (KVPoll.Failed, KVPoll.Success) or request is None:
            return bool(status == KVPoll.Failed)
        if request.given_up and not self._all_ended():
            self._fail(self._given_up_text())
        elif status == KVPoll.Bootstrapping and request.complete:
            mismatch = self._mismatch(request.first_message)
            if mismatch:
                self._fail(mismatch)
            else:
                self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)
        return bool(self.kv_mgr.check_status(self.bootstrap_room) == KVPoll.Failed)

    def _all_ended(self) -> bool:
        """Return True if all pages, items and metadata were offered, and all leases have ended."""
        return self._all_offered and all(lease.done for lease in self._leases)

    def _mismatch(self, message: RoomMessage) -> str:
        """Return an error text if the decode server waits for another prompt than this request has.

        `message` has the digest of that prompt. Return "" if both prompts agree, or if one is unknown.
        """
        if self.prompt is None or not message.prompt:
            return ""
        digest = prompt_digest(message.name, self.prompt)
        if digest == message.prompt:
            return ""
        ours = f"the prefill server's has {counted(len(self.prompt), 'token')} and digest {digest}"
        theirs = f"the decode server's has {message.prompt_tokens} and digest {message.prompt}"
        return f"PromptMismatch: room {int(self.bootstrap_room)} has two prompts: {ours}, {theirs}"

    def _set_final_state(self) -> None:
        """After all leases have ended, set the request's final state.

        The state is Success if everything was offered and each lease ended as READ, else Failed.
        """
        try:
            ends = {lease.outcome.result(0) for lease in self._leases}
        except (KVFlowError, TimeoutError) as error:
            self._fail(f"it is not known how its leases have ended: {error}")
            return
        if self._all_offered and ends == {LeaseOutcome.READ}:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        else:
            self._fail(f"its leases ended as {', '.join(sorted(ends))}")

    def abort(self) -> None:
        """Abort the request and fail its leases, which notifies the readers.

        The request has no final state until its leases have ended. Until then SGLang keeps the request's pages.
        """
        super().abort()
        self._give_up("the prefill server has aborted the request")
        if not all(lease.done for lease in self._leases):
            self.conclude_state = None

    def _give_up(self, reason: str) -> None:
        """Fail all leases of the request, and send readers the `reason`. Without leases, refuse the request.

        A second call does nothing.
        """
        if self._gave_up:
            return
        self._gave_up = True
        for lease in self._leases:
            with contextlib.suppress(KVFlowError, TimeoutError):
                lease.fail(reason)
        if not self._leases:
            self.kv_mgr.refuse_answer(self._answer, reason)

    def clear(self) -> None:
        """Fail the leases that are still open, then forget the request, as SGLang's own sender does."""
        if not all(lease.done for lease in self._leases):
            self._give_up("the prefill server has given the request up")
        super().clear()
        _forget_dropped(self.kv_mgr, self.bootstrap_room, self._answer)

    def failure_exception(self) -> None:
        """Forget the request, and raise the error that SGLang's client gets."""
        reason = self.kv_mgr.failure_records.get(self.bootstrap_room, "")
        self.conclude_state = KVPoll.Failed
        self.clear()
        self.trace_ctx.trace_req_finish()
        raise failure(self.bootstrap_room, reason)

    def _fail(self, reason: str) -> None:
        self.kv_mgr.fail(self.bootstrap_room, reason)
        self._give_up(reason)


def failure(room: int, reason: str) -> KVTransferError:
    """Return SGLang's error for the failed request of `room`. If `reason` is empty, another rank has failed."""
    said = reason or "Failed due to an unknown reason from another rank"
    return KVTransferError(int(room), said, is_from_another_rank=not reason)


def _forget_dropped(manager: Any, room: Room, answer: Any) -> None:
    manager.forget(room)
    manager.remove_answer(answer)
