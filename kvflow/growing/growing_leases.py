"""Growing leases at the producer: report computed tokens, add blocks, and complete the prompt of an open lease."""

from __future__ import annotations

from collections.abc import Callable

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.policy.events import DeviceEvent, checked_event, has_happened
from kvflow.errors import RequestError
from kvflow.limits import GIVEN_PAYLOAD_BYTES_MAX
from kvflow.runtime.producer.blocks import HeldBlocks, OfferedBlocks
from kvflow.runtime.producer.lease import OpenLease, ServeRequest


class GrowingLeases:
    """Opens the leases that grow, and makes them grow by `advance`, `extend` and `complete`."""

    def __init__(self, blocks: OfferedBlocks, answer_readers: Callable[[str], object], block_ids_max: int) -> None:
        """`blocks`: the blocks of all leases. `block_ids_max`: maximum number of block ids in one lease.

        `answer_readers`: function that takes a lease's request id, and answers the readers that have asked about the
        lease.
        """
        self._blocks = blocks
        self._answer_readers = answer_readers
        self._block_ids_max = block_ids_max

    def take(self, request: ServeRequest, lease_id: str, ready: DeviceEvent | None) -> HeldBlocks:
        """Check a request with `computed_tokens`, `extends` or `payload`, and take what its lease needs.

        `ready`: the device event after which the tokens are computed, unless it has happened. If this raises, for
        example RequestError, nothing has been taken.
        """
        what, tokens, computed = f"request {request.request_id!r}", request.num_tokens, request.computed_tokens
        extends = request.extends
        if computed is None:
            if extends:
                raise RequestError(f"{what}: extends: needs computed_tokens, num_tokens is {tokens}")
            computed = tokens
        elif computed > tokens:
            raise RequestError(f"{what}: computed_tokens is {computed}, num_tokens is {tokens}")
        else:
            extends = extends or self._blocks.needs_more_blocks(request.block_ids, tokens, what)
        held = self._blocks.take(request.request_id, request.block_ids, tokens, lease_id, extends=extends)
        if extends and (count := sum(held.counts)) > (most := self._block_ids_max):
            self._blocks.undo_take(held)  # no reader accepts a ticket of that size
            needs = f"num_tokens {tokens} needs {counted(count, 'block')}"
            raise RequestError(f"{what}: {needs}, at most {most} (limits.block_ids_max)")
        if request.computed_tokens is not None and computed > (holds := self._blocks.tokens_with_blocks(held)):
            self._blocks.undo_take(held)
            raise RequestError(f"{what}: computed_tokens is {computed}, its blocks hold {holds}")
        if len(held.entries) or extends:
            self._blocks.advance(held, computed, ready)
        return held

    def advance(self, opened: OpenLease, num_tokens: int, ready: DeviceEvent | None) -> None:
        """Record that `num_tokens` tokens of the prompt are computed, once the device event `ready` has happened.

        No effect if the lease has ended. Raise RequestError if `num_tokens` is less than before, more than the lease
        offers, or more than its blocks hold. Raise LayoutError if a tensor of the cache has moved.
        """
        what, held = f"request {opened.ticket.request_id!r}", opened.held
        tokens, awaited = checks.whole(num_tokens, f"{what}: num_tokens", least=0), None
        if ready is not None and (event := checked_event(ready, f"{what}: ready")) is not None:
            awaited = None if has_happened(event, f"{what}: ready") else event
        if not opened.entry.is_open:
            return
        if not held.announced <= tokens <= held.num_tokens:
            known = f"{held.announced} are computed already, {held.num_tokens} are offered"
            raise RequestError(f"{what}: advance() to {counted(tokens, 'token')}: {known}")
        if tokens > (holds := self._blocks.tokens_with_blocks(held)):
            to = counted(tokens, "token")
            raise RequestError(f"{what}: advance() to {to}: its blocks hold {holds}, extend() it first")
        self._blocks.check_tensors()
        self._blocks.advance(held, tokens, awaited)
        self._blocks.grow(held)

    def extend(self, opened: OpenLease, block_ids: object) -> None:
        """Add blocks to an open lease, and answer the readers that wait for them. No effect if the lease has ended.

        Raise RequestError if the block ids are invalid or too many.
        """
        what, held = f"request {opened.ticket.request_id!r}", opened.held
        count = checks.count_block_ids(block_ids, self._block_ids_max, f"{what}: extend(): block_ids")
        if not opened.entry.is_open:
            return
        if len(held.entries) + count > self._block_ids_max:
            most = f"at most {self._block_ids_max} (limits.block_ids_max)"
            raise RequestError(f"{what}: {counted(len(held.entries) + count, 'block id')} in all, {most}")
        self._blocks.extend(opened.ticket.request_id, held, block_ids)
        self._answer_readers(opened.ticket.request_id)

    def complete(self, opened: OpenLease, payload: bytes, ready: DeviceEvent | None) -> None:
        """Record that all tokens are computed, once `ready` has happened. Set the payload, and answer waiting readers.

        No effect if the lease has ended. Raise RequestError if `payload` is too long, was not promised, or differs from
        the payload of an earlier call.
        """
        what, most = f"request {opened.ticket.request_id!r}: complete()", GIVEN_PAYLOAD_BYTES_MAX
        given = checks.instance(payload, bytes, f"{what}: payload")
        if len(given) > most:
            raise RequestError(f"{what}: a payload of {counted(len(given), 'byte')}, at most {most}")
        if not opened.entry.is_open:
            return
        before = opened.payload
        if given and before is not None and given != before:
            had = f"another one of {counted(len(before), 'byte')} was given before" if before else "none was promised"
            raise RequestError(f"{what}: a payload of {counted(len(given), 'byte')}, but {had} (ServeRequest.payload)")
        self.advance(opened, opened.held.num_tokens, ready)
        if before is None:
            opened.payload = given
        self._answer_readers(opened.ticket.request_id)
