"""The questions of a load to its producers about leases that are not complete, and the answers.

Each rank with an incomplete lease is asked one question at a time. The rank answers when the lease is complete or has
ended, has blocks that this reader does not know, or has as many computed tokens as the reader wants. Then the load
fetches the seal, and the rank is asked again. Only answers bring payloads, and blocks that no ticket names. An answer
proves nothing, and a load that needs neither payload nor more block ids succeeds even without answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvflow.checks import counted
from kvflow.core.cache.groups import tokens_held
from kvflow.core.plan.descriptors import BlockIds, check_block_ids
from kvflow.core.protocol import messages
from kvflow.core.protocol.messages import LeaseAnswerState
from kvflow.errors import KVFlowError, PeerError, ProtocolError, RequestError
from kvflow.limits import GIVEN_PAYLOAD_BYTES_MAX
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.plan import MatchedChunks, remote_tables
from kvflow.runtime.part import PartHost
from kvflow.runtime.peers.peer import Source, peer_text

_PAUSE_S = 0.1  # after an answer without new blocks, unless the load waits for more tokens


@dataclass(slots=True, eq=False)
class FollowedLease:
    """Facts about one rank's lease, from the ticket and from the rank's answers."""

    source: Source
    tables: Sequence[BlockIds]
    """Block ids of the lease, one array for each group; -1: the id is not known yet."""
    known: list[int]
    """Number of known block ids, for each group."""
    num_tokens: int
    final_state: asyncio.Future[LeaseAnswerState]
    """Future for the final state of the lease. If the rank no longer answers, the future gets an exception."""
    payload: bytes = b""
    failed: str = ""
    """Reason, given by the rank, why the prompt could not be computed; else empty."""
    problem: KVFlowError | None = None
    """Error after which the rank gives no more answers, if the load still needs block ids from the rank; else None."""
    missing_max: int = -1
    """The rank is asked to answer as soon as at most this many tokens are missing; -1: only once the lease is complete
    or has ended."""
    asked: bool = False
    """True while the rank has a question about the lease, and will answer it."""
    lowered: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set when `missing_max` was lowered, so that the rank is asked again immediately."""
    ids_to_fill: list[tuple[BlockIds, BlockIds, BlockIds]] = field(default_factory=list)
    """Tuples (array, positions, table), one for each array of remote block ids in the load's chunks.

    `table` is one of `tables`. When more ids of `table` are known, `table[positions[i]]` is written to `array[i]`, for
    each i.
    """
    known_tokens: int = field(init=False)
    """Number of the prompt's first tokens for which the block ids of all groups are known."""

    def __post_init__(self) -> None:
        self._count_tokens()

    def fill_chunks(self, matched: MatchedChunks) -> None:
        """Register the load's chunks (tokens of one block each), so that later answers fill in their remote block ids.

        `matched`: these chunks, with positions in the block table in place of ids.
        """
        for block_map, chunks in self.source.chunks.items():
            table = self.tables[block_map.remote_group]
            for some, places in zip(chunks, matched[block_map.match_key], strict=True):
                self.ids_to_fill.append((some.remote_ids, places.remote_ids, table))

    def set_missing_max(self, missing_max: int) -> None:
        """Have the rank answer later questions once at most `missing_max` tokens are missing; -1: at the lease's end.

        A lower number than before also shortens the pause before the next question.
        """
        if missing_max < self.missing_max:
            self.lowered.set()
        self.missing_max = missing_max

    def apply_answer(self, answer: messages.LeaseAnswer) -> None:
        """Update this record from a rank's answer, and fill in block ids.

        Raise ProtocolError if the answer is invalid.
        """
        added = [ids for ids in answer.more_block_ids if ids]
        if added:
            self._add_block_ids(answer.more_block_ids)
        if len(answer.payload) > GIVEN_PAYLOAD_BYTES_MAX:
            size = f"{counted(len(answer.payload), 'byte')}, at most {GIVEN_PAYLOAD_BYTES_MAX}"
            raise self.source.peer.at.failure(ProtocolError, f"its payload has {size}")
        if answer.state is LeaseAnswerState.COMPLETE and self.known_tokens < self.num_tokens:
            told = f"its blocks hold {self.known_tokens} of {counted(self.num_tokens, 'token')}"
            raise self.source.peer.at.failure(ProtocolError, f"its lease is complete, but {told}")
        self.payload = answer.payload
        over = answer.state is LeaseAnswerState.ENDED or answer.state is LeaseAnswerState.FAILED
        if over and self.ids_to_fill and self.known_tokens < self.num_tokens:
            self.source.proof.note_fetched(
                None, -math.inf
            )  # as if the seal was found wiped: it may never be fetched again
        if answer.state is LeaseAnswerState.FAILED:
            why = peer_text(answer.reason) or "it does not say why"
            self.failed = f"its producer could not compute the prompt: {why}"
        if answer.state is not LeaseAnswerState.OPEN and not self.final_state.done():
            self.final_state.set_result(answer.state)

    def fail(self, error: KVFlowError) -> None:
        """Record that the rank gives no further answers, because of `error`."""
        if not self.final_state.done():
            self.final_state.set_exception(error)
            self.final_state.exception()  # mark it as retrieved: a load that needs no answer continues
        if self.ids_to_fill and self.known_tokens < self.num_tokens:
            self.problem = error

    def _add_block_ids(self, more: tuple[tuple[int, ...], ...]) -> None:
        at = self.source.peer.at
        if len(more) != len(self.tables):
            raise at.failure(ProtocolError, f"more blocks of {counted(len(more), 'group')}, it has {len(self.tables)}")
        tables = []
        for ids, table, known, count in zip(
            more, self.tables, self.known, self.source.connection.num_blocks, strict=True
        ):
            if known + len(ids) > len(table):
                raise at.failure(
                    ProtocolError, f"{counted(known + len(ids), 'block')} of a lease that has {len(table)} in the end"
                )
            try:
                all_ids = [*table[:known].tolist(), *ids]
                tables.append(check_block_ids(all_ids, num_blocks=count, what="blocks of its lease"))
            except RequestError as error:
                raise at.failure(ProtocolError, str(error)) from error
        for index, found in enumerate(tables):
            self.known[index] = len(found)
            self.tables[index][: len(found)] = found
        self._count_tokens()
        for ids_of_load, positions, table in self.ids_to_fill:
            ids_of_load[:] = table[positions]

    def _count_tokens(self) -> None:
        groups, counts = self.source.connection.groups, tuple(map(len, self.tables))
        self.known_tokens = tokens_held(groups, self.known, counts, self.num_tokens)


class LeaseQuestions:
    """Asks the ranks of one load about their leases, from the creation of this object until `close`."""

    def __init__(self, load: Load, sources: Sequence[Source], host: PartHost) -> None:
        """Start a task for each of `sources`, which asks the source's rank about the lease.

        Raise RuntimeUnavailable if the runtime is closed.
        """
        loop, ticket = asyncio.get_running_loop(), load.ticket
        self.followed = [
            FollowedLease(
                source=source,
                tables=source.tables or remote_tables(ticket, source),
                known=[len(ids) for ids in source.lease.block_tables or ticket.block_tables],
                num_tokens=ticket.num_tokens,
                final_state=loop.create_future(),
            )
            for source in sources
        ]
        self.on_answer: Callable[[Source], None] | None = None
        """Callback after each answer, with the source of the lease. None unless a growing lease is being read."""
        self._request_id = ticket.request_id
        self._host = host
        self._tasks = [
            host.context.spawn(self._ask_until_ended(one), name=f"kvflow-news {self._request_id}")
            for one in self.followed
        ]

    @property
    def failed(self) -> str:
        """Reason why the prompt could not be computed, from the first rank that gave one; else empty."""
        return next((one.failed for one in self.followed if one.failed), "")

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def payload(self) -> bytes | None:
        """Wait until all leases that promise a payload are complete or have ended.

        Return the payload, empty if no lease promised one; None if a lease has ended without the promised payload.
        Raise PeerError if a rank failed to answer, so the payload will not be known.
        """
        found = b""
        for one in self.followed:
            if one.source.lease.payload:
                if await asyncio.shield(one.final_state) is not LeaseAnswerState.COMPLETE:
                    return None
                found = found or one.payload
        return found

    async def _ask_until_ended(self, one: FollowedLease) -> None:
        """Ask the rank of the lease `one` about the lease, again after each answer.

        Task `kvflow-news <request>`: begun by a load, for each rank with a lease that is not complete. The task ends
        when the lease is complete or has ended, when the rank fails to answer, or when the load ends.
        """
        peer, state = one.source.peer, LeaseAnswerState.OPEN
        while state is LeaseAnswerState.OPEN:
            known = tuple(one.known)
            one.lowered.clear()
            question = messages.LeaseRequest(
                reader=self._host.context.local.reader,
                target=peer.at,
                request_id=self._request_id,
                lease_id=one.source.lease.lease_id,
                known=known,
                missing_max=one.missing_max,
            )
            try:
                one.asked = True
                answer = await self._host.peers.ask_until_answered(peer, question)
                one.apply_answer(answer)
                state = answer.state
            except PeerError as error:
                one.fail(error)
                state = LeaseAnswerState.ENDED
            one.asked = False
            if self.on_answer is not None:
                self.on_answer(one.source)
            if state is LeaseAnswerState.OPEN and tuple(one.known) == known:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_S):
                        await one.lowered.wait()
