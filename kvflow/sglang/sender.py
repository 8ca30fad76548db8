"""The prefill side of one request: a lease that grows with each chunk that the scheduler sends.

The scheduler's thread calls all of this but `give_up`. Its pages may be reused once `poll` has said Success or Failed:
both wait for the leases to be over. SGLang also frees pages at once after an `abort` in the middle of a prefill; no
load can succeed then, since the payload that it waits for never comes.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVSender

from kvflow.blocking import Lease
from kvflow.errors import KVFlowError
from kvflow.runtime.producer.lease import ServeRequest
from kvflow.runtime.producer.open_lease import LeaseOutcome
from kvflow.sglang.manager import Wanted


class KVFlowSender(CommonKVSender):
    """The sender that SGLang makes for each request of a prefill server."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **named: Any) -> None:
        self._leases: list[Lease] = []
        self._complete = False
        self._early_send_wait_event: Any = None
        mgr.opens(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **named)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Offer what is to come, once the decode server has asked."""
        super().init(num_kv_indices, aux_index)
        pool = self.kv_mgr.pools[0]
        tokens = num_kv_indices * pool.page_size
        self._offer(0, [], tokens, computed_tokens=0, extends=True, payload=True)

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, **events: Any) -> None:
        """Offer pages that are computed, or are once the event of their chunk has happened."""
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed) or not self._leases:
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
                self._end(state_indices, ready)
        except KVFlowError as error:
            self._fail(f"it could not be offered: {error}")

    def _grow(self, pages: Any, ready: Any) -> None:
        lease, page_size = self._leases[0], self.kv_mgr.pools[0].page_size
        if len(pages):
            lease.extend(pages.tolist())
            if self.curr_idx < self.num_kv_indices:
                lease.advance(self.curr_idx * page_size, ready)

    def _end(self, state_indices: Any, ready: Any) -> None:
        """Offer what comes with the last chunk: state, then the metadata."""
        wanted = self._wanted()
        prefix_len = 0 if wanted is None else wanted.decode_prefix_len
        for at, items in enumerate(self.kv_mgr.items_of((), state_indices, self.aux_index, prefix_len)):
            if items is not None and len(items):
                self._offer(at, list(items), len(items) * self.kv_mgr.pools[at].page_size)
        self._leases[0].complete(b"." if self.kv_mgr.aux_moves else self.kv_mgr.aux.read(self.aux_index), ready)
        self._complete = True

    def _offer(self, at: int, blocks: Any, tokens: int, **how: Any) -> None:
        wanted = self._wanted()
        if wanted is None:
            self._fail("the decode server has given the request up")
            return
        pool = self.kv_mgr.pools[at]
        if not pool.cut and wanted.is_dummy:
            return
        readers = 1 if pool.cut else wanted.readers
        request = ServeRequest(wanted.name, blocks, tokens, reader_count=readers, **how)
        try:
            self._leases.append(pool.runtime.serve_blocks(request))
        except KVFlowError as error:
            self._fail(f"it could not be offered: {error}")

    def _wanted(self) -> Wanted | None:
        """Message of a decode rank about the room; None once it has given it up."""
        told: dict[str, Wanted] = self.kv_mgr.transfer_infos.get(self.bootstrap_room, {})
        return next(iter(told.values()), None)

    def _poll_with_status(self, check_status: Any) -> Any:
        """Tell the state; never blocks, since it is known which leases are over."""
        if self.conclude_state is None and self._leases:
            failed = self.kv_mgr.request_status.get(self.bootstrap_room, KVPoll.Failed) == KVPoll.Failed
            if failed:
                self.give_up("the prefill server has given the request up")
            if not all(lease.done for lease in self._leases):
                return KVPoll.Transferring if failed or self._complete else super()._poll_with_status(check_status)
            if not failed:
                self._judge()
        return super()._poll_with_status(check_status)

    def _judge(self) -> None:
        """Conclude, once all leases are over."""
        ends = {lease.outcome.result(0) for lease in self._leases}
        if self._complete and ends == {LeaseOutcome.READ}:
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
        else:
            self._fail(f"its leases ended as {', '.join(sorted(ends))}")

    def abort(self) -> None:
        """End it: whoever reads is told, and pages are kept until nobody can be."""
        super().abort()
        self.give_up("the prefill server has aborted the request")
        if not all(lease.done for lease in self._leases):
            self.conclude_state = None

    def give_up(self, reason: str) -> None:
        """Give a request up, from any thread: it will not be read. What was not offered yet is declined."""
        with contextlib.suppress(KVFlowError):
            for lease in tuple(self._leases):
                lease.fail(reason)
            if not self._leases:
                self.kv_mgr.refuse(self.bootstrap_room, reason)

    def clear(self) -> None:
        """Forget the request, as SGLang does."""
        if not all(lease.done for lease in self._leases):
            self.give_up("the prefill server has given the request up")
        super().clear()
        self.kv_mgr.closes(self.bootstrap_room, self)

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, f"kvflow: {reason}")
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.give_up(reason)
