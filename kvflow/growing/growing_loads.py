"""Loads of growing leases: the prompt is still being computed, or being copied to memory that peers can read.

A load learns how far a lease has grown from the answer to a question that waits at the producer (`lease_questions`). An
answer proves nothing, so the load fetches the seal after each answer, and at the end of the read. In case no answer
comes, the load also fetches the seal every `SEAL_FETCH_ASKED_S` while the rank has a question of the load, else every
`SEAL_FETCH_EVERY_S`. Tokens that a seal shows to be readable are read in prompt order, once they are enough for a read,
and where possible from each rank independently.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from heapq import merge

from kvflow.checks import counted
from kvflow.core.policy.history import History
from kvflow.core.protocol import messages
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import COMPUTE, RequestError
from kvflow.growing.decline_request import DeclineRequest
from kvflow.growing.growing_leases import GrowingLeases
from kvflow.growing.late_blocks import LateBlocks
from kvflow.growing.lease_questions import FollowedLease, LeaseQuestions
from kvflow.growing.pending_tickets import PendingTickets
from kvflow.growing.spans import STOP_TOKEN, DirectSpans, PromptSpan, SpanPlanner, SpanQueue
from kvflow.runtime.clock import Alarm
from kvflow.runtime.load.flight import CopyGroup, Flight, ReadSource
from kvflow.runtime.load.load import Load, LoadPerformer
from kvflow.runtime.load.plan import MatchedChunks, Plan
from kvflow.runtime.load.reads import direct_reads
from kvflow.runtime.optional import Growing
from kvflow.runtime.part import PartHost
from kvflow.runtime.peers.peer import Source

__all__ = ["GrowingLeases", "GrowingLoads", "begin"]

SEAL_FETCH_EVERY_S = 0.1
SEAL_FETCH_ASKED_S = 2.0  # the answer says when to fetch the seal, unless the answer is lost
_WORTH_S = 1e-3
_WORTH_LEAST_BYTES = 1 << 17  # moved in a millisecond at a gigabit per second
_GOLDEN = 0.618  # the fractional parts of its multiples are spread evenly
_SPEED_SHARE = 0.25  # weight of a new measurement in the average


def begin(host: PartHost) -> Growing:
    """Return the object that reads growing leases into the registered cache of `host`."""
    return GrowingLoads(host)


class GrowingLoads:
    """Reads growing leases into one registered cache."""

    def __init__(self, host: PartHost) -> None:
        self.pending_tickets = PendingTickets(host)
        self.clock = host.context.clock
        self.limits = host.context.config.limits
        self.check_tensors = host.resources.ledger.check_tensors
        self._host = host
        self.loads_begun = 0

    def answer(self, question: messages.ReaderRequest) -> messages.Ack:
        """Apply the notice that the readers of a request are to be redirected, the only request to this part."""
        assert isinstance(question, DeclineRequest), "by its row in parts.REQUESTS"
        return self.pending_tickets.redirect(question)

    def add_late_blocks(self, load: Load, tickets: Sequence[Ticket]) -> LoadPerformer:
        """Let `load` get blocks while it runs (`LoadRequest.extends`). Return the function that performs the load.

        `tickets`: the tickets of its request. RequestError if a load with these tickets can get no blocks later.
        """
        if len(tickets) > 1 or load.request.again is not None:
            raise RequestError(
                f"request {load.request_id!r}: extends: a load of several tickets, or with `again`, needs all blocks"
            )
        load.late_blocks = late_blocks = LateBlocks(self._host, self.pending_tickets, load)
        return late_blocks.perform

    def ask_about_leases(self, load: Load, sources: Sequence[Source], matched: MatchedChunks) -> None:
        """Begin to ask the ranks of `sources` about what seals do not show: block ids, payload, end of the lease.

        This sets `load.lease_questions`. `matched`: the load's chunks with positions in block tables in place of block
        ids (`Plan.matched`); once an answer has the id at such a position, the id is written to the load's chunk. Raise
        RuntimeUnavailable if the runtime is closed.
        """
        load.lease_questions = questions = LeaseQuestions(load, sources, self._host)
        for one in questions.followed:
            if one.source in load.sources:
                one.fill_chunks(matched)

    async def read_growing(self, load: Load, flight: Flight, plan: Plan) -> bool:
        """Read the load's blocks while they are being computed. Return True if the leases covered the whole read."""
        self.loads_begun += 1
        spans = self._host.steps.staging_for(load, plan) or DirectSpans(self.limits)
        assert isinstance(spans, SpanPlanner), "what reads through buffers plans their spans"
        read = _GrowingRead(self, spans, load, flight, plan.matched)
        try:
            return await flight.read_groups(read.copy_groups())
        finally:
            read.close()


class _GrowingRead:
    """One load's read of growing leases: decides when to read which spans, and when to fetch seals.

    Each load waits for another number of bytes before its first read. Otherwise loads of leases that grow at the same
    pace would all read in the same turn of the event loop.
    """

    def __init__(
        self, growing: GrowingLoads, spans: SpanPlanner, load: Load, flight: Flight, matched: MatchedChunks
    ) -> None:
        self._growing = growing
        self._spans = spans
        self._load = load
        self._flight = flight
        self._matched = matched
        self._tokens = load.ticket.num_tokens
        self._late_blocks = load.late_blocks if isinstance(load.late_blocks, LateBlocks) else None
        if self._late_blocks is not None:
            self._late_blocks.begin_read(load.sources)
        self._worth_share = 0.5 + (growing.loads_begun * _GOLDEN) % 1.0
        """Share of `_worth_bytes` that must be readable before the next read."""
        self._seals_due = set(load.sources)
        """Sources with seals that have to be fetched next."""
        self._speeds: dict[ReadSource, float] = {}
        """Measured average speed of reads, by source, in bytes per second."""
        self._followed: dict[Source, FollowedLease] = {}
        self._alarm = Alarm(growing.clock, self._on_alarm)
        self._listen_for_answers()

    def close(self) -> None:
        """Ignore later answers of ranks, and stop the timer that fetches seals."""
        if isinstance(self._load.lease_questions, LeaseQuestions):
            self._load.lease_questions.on_answer = None
        self._alarm.set(math.inf)

    async def copy_groups(self) -> AsyncGenerator[CopyGroup, None]:
        """Yield groups of reads while the prompt is being computed, each when enough tokens are readable.

        If all tokens are readable before the first read, and can be read straight into the cache, yield the same reads
        as for a lease that does not grow. The iterator ends when all tokens are read, or when a lease has ended.
        """
        sources, load = self._load.sources, self._load
        queues = self._spans.span_queues(sources, load.tables)
        untouched = all(queue.reads_directly for queue in queues) and not load.ticket.extends
        frontier = Frontier(queues, sources, load, load.landed)
        while queues or (load.progress_wanted and not frontier.done):
            frontier.report_proven()
            await self._fetch_due_seals(frontier)
            if any(source.proof.lease_ended for source in sources):
                return
            readable = computed = {source: self._readable_tokens(source) for source in sources}
            if self._late_blocks is not None:
                self._late_blocks.note_computed(min(computed.values()))
                usable = self._late_blocks.usable_tokens
                readable = {source: min(tokens, usable) for source, tokens in computed.items()}
            if untouched and min(readable.values()) >= self._tokens:
                self._leave_compute()
                for read in direct_reads(self._growing.limits, sources, None):
                    yield CopyGroup((read,))
                return
            due = self._queues_to_read(queues, readable, computed)
            untouched = untouched and not due
            if due:
                self._leave_compute()
            spans = (queue.take_spans(_readable_in(queue, readable)) for queue in due)
            for one in merge(*spans, key=STOP_TOKEN):
                group = await self._spans.copy_group(one)
                yield group._replace(on_land=partial(self._span_landed, frontier, one, group))
            queues = [queue for queue in queues if not queue.done]
            if not due and all(source.proof.fetch_under_way for source in self._seals_due):
                await self._wait()

    def _leave_compute(self) -> None:
        """If the load is in the phase "compute" or "queued", enter "wire", because more tokens are readable now.

        LayoutError if a tensor of the cache has moved since then.
        """
        self._growing.check_tensors()
        if self._load.phase != "wire":
            self._load.enter_phase("wire")

    def _span_landed(self, frontier: Frontier, one: PromptSpan, group: CopyGroup, now_s: float, begun_s: float) -> None:
        took_s = now_s - begun_s
        if took_s > 0:
            for read in group.reads:
                speed = read.descriptors.size_bytes / took_s
                before = self._speeds.get(read.source, speed)
                self._speeds[read.source] = before + (speed - before) * _SPEED_SHARE
        frontier.note_landed(one)

    def _readable_tokens(self, source: Source) -> int:
        """Return how many of the prompt's first tokens `source` has computed into blocks with ids known to the load."""
        readable, followed = source.proof.readable_tokens(self._tokens), self._followed.get(source)
        return readable if followed is None else min(readable, followed.known_tokens)

    def _queues_to_read(
        self, queues: Sequence[SpanQueue], readable: Mapping[Source, int], computed: Mapping[Source, int]
    ) -> list[SpanQueue]:
        """Return the span queues to read from now.

        Always return the queues that can be read to their end. Return the other queues only if their readable bytes,
        summed over these queues, are worth a read. If no queue is returned, have each rank answer once enough tokens
        are computed. `readable`, `computed`: number of tokens by source that are computed and, if readable, have local
        blocks.
        """
        due, rest, size_bytes = list[SpanQueue](), list[SpanQueue](), 0
        for queue in queues:
            upto = _readable_in(queue, readable)
            queue_bytes = queue.readable_bytes(upto)
            if queue_bytes and upto >= self._tokens:
                due.append(queue)
            elif queue_bytes:
                rest.append(queue)
                size_bytes += queue_bytes
        sources = dict.fromkeys(source for queue in queues for source in queue.sources)
        worth = int(self._worth_bytes(sources) * self._worth_share)
        if rest and size_bytes >= worth:
            due += rest
            self._worth_share = 1.0
        if not due and queues:
            more = max((worth - size_bytes) // max(sum(queue.size_bytes(1) for queue in queues), 1), 1)
            for source in sources:
                missing = self._tokens - computed[source]
                if (followed := self._followed.get(source)) is not None:
                    followed.set_missing_max(max(missing - more, 0) if missing else -1)
        return due

    def _worth_bytes(self, sources: Iterable[Source]) -> int:
        """Return the smallest number of bytes that is worth a read: what `sources` deliver in about a millisecond.

        With this bound few bytes are left when the prompt is complete, and small steps of a lease do not cause many
        small reads.
        """
        speed = sum(self._speeds.get(source, 0.0) for source in sources)
        return min(max(int(speed * _WORTH_S), _WORTH_LEAST_BYTES), self._growing.limits.slice_bytes_max)

    async def _fetch_due_seals(self, frontier: Frontier) -> None:
        """Post a fetch of each seal that is due, unless a fetch of the same seal is under way.

        If the load's caller has asked for progress and more tokens have landed, also fetch the seals that do not prove
        these tokens yet.
        """
        has_unproven = self._load.progress_wanted and frontier.has_unproven
        for source in self._load.sources:
            wanted = source in self._seals_due or (has_unproven and not frontier.is_proven_by(source))
            if wanted and not source.proof.fetch_under_way:
                self._seals_due.discard(source)
                await self._flight.post_seal_read(source)
                frontier.note_fetch_posted(source)

    async def _wait(self) -> None:
        """Wait until a read or a fetch of a seal has ended, a rank has answered, or a fetch of seals is due.

        Once a seal has been fetched from each rank, begin to ask the ranks about their leases. Raise the error of a
        rank that no longer answers, if the load needs more block ids from that rank.
        """
        if self._load.lease_questions is None and all(
            source.proof.last_open_s > -math.inf for source in self._load.sources
        ):
            self._growing.ask_about_leases(self._load, self._load.sources, self._matched)
            self._listen_for_answers()
        for followed in self._followed.values():
            if followed.problem is not None:
                raise followed.problem
        if self._late_blocks is not None and self._late_blocks.problem is not None:
            raise self._late_blocks.problem
        if self._alarm.due_s == math.inf:
            self._alarm.set(self._growing.clock.now_s() + SEAL_FETCH_EVERY_S)
        if not self._flight.reads_blocks:
            self._enter_phase_of_wait()
        await self._flight.wait_for_change()

    def _enter_phase_of_wait(self) -> None:
        """Enter the phase "queued" if the load waits for local blocks, "compute" if it waits for computed tokens."""
        load, late_blocks = self._load, self._late_blocks
        if late_blocks is not None and late_blocks.lacking:
            if load.phase != "queued":
                load.enter_phase("queued", lambda: late_blocks.lacking_text)
        elif load.phase != COMPUTE and self._computed < self._tokens:
            load.enter_phase(COMPUTE, self._computed_text)

    @property
    def _computed(self) -> int:
        return min(map(self._readable_tokens, self._load.sources))

    def _computed_text(self) -> str:
        """Return how many tokens of the prompt the producer has computed, as a text for errors."""
        flight, tokens = self._flight, f"{self._computed} of {counted(self._tokens, 'token')} computed"
        silent_s = self._growing.clock.now_s() - flight.last_read_s
        if not flight.under_way or silent_s < 2 * SEAL_FETCH_EVERY_S:
            return tokens
        return f"{tokens}, as far as is known: a fetch of its seal has not ended for {silent_s:.3g} s"

    def _on_alarm(self) -> None:
        """Callback of `_alarm`: have seals fetched of which no answer has told anything for some time."""
        now_s = self._growing.clock.now_s()
        asked = {
            source
            for source, one in self._followed.items()
            if one.asked or self._readable_tokens(source) >= self._tokens  # then only its end is news
        }
        since_s = {source: now_s - source.proof.last_open_s for source in self._load.sources}
        due = [source for source in since_s if source not in asked or since_s[source] >= SEAL_FETCH_ASKED_S]
        if due:
            self._seals_due.update(due)
            self._flight.nudge()
        else:
            self._alarm.set(now_s + max(SEAL_FETCH_ASKED_S - max(since_s.values()), SEAL_FETCH_EVERY_S))

    def _on_answer(self, source: Source) -> None:
        """Callback when a rank has answered about the lease of `source`: have the seal of `source` fetched next."""
        if source in self._load.sources:
            self._seals_due.add(source)
        self._flight.nudge()

    def _listen_for_answers(self) -> None:
        """If the load asks ranks about leases, register `_on_answer`, and ask for an answer at the first new token."""
        news = self._load.lease_questions
        if not isinstance(news, LeaseQuestions):
            return
        news.on_answer = self._on_answer
        for one in news.followed:
            if one.source in self._load.sources:
                self._followed[one.source] = one
                one.set_missing_max(self._tokens - 1)


def _readable_in(queue: SpanQueue, readable: Mapping[Source, int]) -> int:
    """Return the minimum, over the sources of `queue`, of `readable` (number of readable tokens by source)."""
    return min(readable[source] for source in queue.sources)


class Frontier:
    """How far the tokens of a load have landed in all groups, and how far seals prove them.

    A fetched seal of an open lease proves the tokens that had landed before its fetch was posted. No clock decides: a
    load of a growing lease takes long, and the clocks of a paused machine stand still.
    """

    def __init__(
        self, queues: Sequence[SpanQueue], sources: Sequence[Source], load: Load, history: History | None
    ) -> None:
        """Track the spans of `queues`. Report proven tokens to `load`, as progress, and landed tokens to `history`."""
        self._queues = queues
        self._load = load
        self._history = history
        self._first = min(queue.tokens.start for queue in queues)
        self._last = max(queue.tokens.stop for queue in queues)
        self._on_answer = self._first
        self._landed_stop = self._first
        """Position in the prompt up to which all tokens have landed in all groups of layers, proven or not."""
        self._fetching = dict[Source, int]()
        """Value of `_landed_stop` at the post of each seal's fetch, until the fetch ends."""
        self._proven = dict.fromkeys(sources, self._first)
        """Position in the prompt up to which the seals of each source prove the tokens."""

    @property
    def done(self) -> bool:
        """True once all tokens are proven and reported to the load."""
        return self._on_answer >= self._last

    @property
    def has_unproven(self) -> bool:
        """True if tokens have landed that are not proven yet, and so not reported to the load."""
        return self._landed_stop > self._on_answer

    def note_landed(self, span: PromptSpan) -> None:
        """Record that `span` landed in the local blocks. That proves nothing: its tokens are not reported yet."""
        span.queue.note_landed(span)
        self._landed_stop = min(self._last, *(queue.landed_upto for queue in self._queues))
        if self._history is not None:
            self._history.note(self._landed_stop)

    def note_fetch_posted(self, source: Source) -> None:
        """Record that a fetch of the seal of `source` was posted just now: it may prove the tokens landed so far."""
        self._fetching[source] = self._landed_stop

    def report_proven(self) -> None:
        """Report the tokens that the seals of all sources prove by now to the load, as its progress."""
        for source in [source for source in self._fetching if not source.proof.fetch_under_way]:
            stop = self._fetching.pop(source)
            if not source.proof.lease_ended:
                self._proven[source] = stop
        proven = min(self._proven.values())
        if proven > self._on_answer:
            self._on_answer = proven
            self._load.note_progress(proven - self._first, self._last - self._first)

    def is_proven_by(self, source: Source) -> bool:
        """Return whether the fetched seals of `source` prove all tokens that have landed."""
        return self._proven[source] >= self._landed_stop
