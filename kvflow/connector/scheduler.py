"""The scheduler's half of a connector, for any engine: what comes from remote, what each step loads, saves and sends.

An engine's scheduler asks here and is told; the answers are decided without waiting, and what has to be done leaves as
a `Step` for the engine's workers. In the order of a request's life:

    add                      a request has come
    num_new_matched_tokens   how much of its prompt can come from remote; no side effects, ask as often as you like
    update_after_alloc       it has blocks now
    build_step               what the workers do in this step
    update_from_workers      what they have finished
    request_finished         may its blocks be freed, and what does the router get?

A request consumes (its parameters are a ticket) or produces (`do_remote_decode`); `core.policy.states` draws the life
of each. A ticket is used once: whatever becomes of the load, after it the prompt is computed locally, also that of
another request with the same ticket, such as another try. Whether a failed load fails its request or is recomputed is
the engine's policy.

Samples of one prompt share a ticket (`Sharing`). The first one's load serves all: the others wait for it, find in the
engine's prefix cache what that keeps, and read no more than the rest, each by itself. The producer is told once, when
none of them needs its blocks any more. What becomes of one sample is its own: if the first is aborted the next one is
the first, and a load that fails sends all the others to try for themselves.

What makes a hand-over safe: a prompt's lease is opened in the step that completes the prompt, under a name that is a
secret until `request_finished` gives it to the router. From then on the blocks are held until the workers report that
the lease has ended; before, a preemption or an abort may take them at once, since nobody can have asked for them.

Or a prompt *flows*: its router has named it beforehand (`rendezvous`) and has sent both requests at once. Then its
lease is opened with its first step, grows with every one, and may be read all the time. What is aborted stays until
its lease has ended; a preemption recalls it, for which the workers' step waits a moment (`Step.recall`).
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import msgspec

from kvflow import checks
from kvflow.connector.parameters import OWN_DIALECT, Dialect, name_of, others_in, rendezvous_in
from kvflow.connector.step import BlockTables, Decline, Grow, Keep, Receive, Release, Save, Send, Step
from kvflow.core.cache.groups import DEFAULT_NAME, GroupFacts, GroupKind
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.states import (
    CONSUMER_TABLE,
    PRODUCER_TABLE,
    ConsumerEvent,
    ConsumerState,
    ProducerEvent,
    ProducerState,
    fire,
    knows,
    request_blocks_held,
)
from kvflow.core.protocol.prompts import check_alike, check_prompt, prompt_digest
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, RequestError, UsageError

__all__ = [
    "ConnectorScheduler",
    "EngineRequest",
    "Finished",
    "Matched",
    "Scheduled",
    "SchedulingConfig",
    "Sharing",
]


def _groups(value: object, what: str) -> tuple[GroupFacts, ...]:
    if not isinstance(value, tuple | list) or not all(isinstance(group, GroupFacts) for group in value):
        raise ConfigError(f"{what}: expected GroupFacts, got {checks.shown(value)}")
    if not all(group.plausible for group in value):
        raise ConfigError(f"{what}: {checks.shown(value)} cannot be")
    return tuple(value)


_RULES = {**checks.rules(ConfigError, whole_least=1), "tuple[GroupFacts, ...]": _groups}
GivenTables: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of a request as its engine has them: a list, or a table for each group of layers."""
_USED_MAX = 1 << 14  # tickets that are remembered


class EngineRequest(Protocol):
    """A scheduler's request, as far as it has to tell."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """None if the engine does not know, or they do not say what the prompt is: nothing is compared then. Where they
        say it together with something else, such as pictures, they are `marked` with it."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


class Matched(NamedTuple):
    """Prompt tokens that can come from remote, and whether they come between the steps."""

    tokens: int | None
    """None while that depends on another request's load: ask again."""
    asynchronous: bool


class Sharing(enum.Enum):
    """Who else has a request's ticket."""

    ALONE = enum.auto()
    """Nobody is meant to: it is the request's own."""
    FIRST = enum.auto()
    """Samples of the same prompt may come, or have come."""
    FOLLOWS = enum.auto()
    """As `FIRST`; if none of the samples is here the ticket is another engine's to use."""


class Scheduled(NamedTuple):
    """A request of this step, and how many of its tokens are computed once the step is."""

    request_id: str
    num_computed_tokens: int


class Finished(NamedTuple):
    """Whether a request's blocks must stay until it is reported as sent or received, and what the router gets."""

    hold_blocks: bool
    params: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """The settings a scheduler decides by. `block_size` is the engine's, in tokens."""

    block_size: int
    lease_ttl_s: float
    """Time an offered prompt is kept for its reader, from the end of its request on."""
    groups: tuple[GroupFacts, ...] = ()
    """Groups of layers of a cache with several, in the order of the engine's block tables; `block_size` is the
    first one's then. None is one group of full attention."""
    fetch_tokens_min: int = 1
    """With fewer tokens than this to come from remote, computing them is faster."""
    full_blocks_only: bool = False
    """Offer only blocks that are full: a prompt shorter than one offers nothing."""
    leave_last_token: bool = False
    """Take less than the whole prompt from remote, or nothing: its last token is computed here, and what that needs is
    not among the blocks that the engine keeps for a whole prompt. Always so with state, which is of one token only."""
    withhold_last_token: bool = False
    """Offer a prompt without its last token although that is computed: for readers that take no whole prompt, where the
    engine does not compute prompts without it."""
    release_failed_loads: bool = True
    """Give the offer of a load that has failed back: its producer need not keep the blocks for the rest of their
    time. False for routers that try again with the same ticket, as at another decode engine."""
    produces: bool = True
    consumes: bool = True

    def __post_init__(self) -> None:
        checks.settle_fields(self, _RULES)
        if self.groups and self.groups[0].block_size != self.block_size:
            first = self.groups[0].block_size
            raise ConfigError(f"groups: block_size is {self.block_size}, but the first group's is {first}")
        if self.full_blocks_only and self.has_state:
            raise ConfigError("full_blocks_only: a state belongs to the last token of the prompt, not to a full block")
        if self.withhold_last_token and self.has_state:
            raise ConfigError("withhold_last_token: a state is that of the last token that was computed")

    @property
    def all_groups(self) -> tuple[GroupFacts, ...]:
        """Every group, also if there is one."""
        return self.groups or (GroupFacts(name=DEFAULT_NAME, block_size=self.block_size),)

    @property
    def has_state(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @property
    def leaves_last_token(self) -> bool:
        """Whether an offer of a whole prompt is of no use."""
        return self.leave_last_token or self.has_state

    def takes(self, params: Mapping[str, Any]) -> bool:
        """Whether a request is to come from remote.

        Args:
            params: its `kv_transfer_params`.

        Returns:
            True if they ask for it, and this engine consumes.
        """
        return self.consumes and bool(params.get("do_remote_prefill"))

    def offers(self, params: Mapping[str, Any]) -> bool:
        """Whether a request is computed for a reader.

        Args:
            params: its `kv_transfer_params`.

        Returns:
            True if they ask for it, and this engine produces. What comes from remote is not offered again.
        """
        return self.produces and bool(params.get("do_remote_decode")) and not self.takes(params)

    @property
    def full_block_tokens(self) -> int:
        """Tokens that fill whole blocks of every group that holds the beginning of a prompt."""
        return math.lcm(*(group.block_size for group in self.all_groups if group.whole), 1)

    def offered_of(self, num_prompt_tokens: int) -> int:
        """Tokens of a prompt that are offered.

        Args:
            num_prompt_tokens: how many it has.

        Returns:
            As many, or those that fill whole blocks of every group with `full_blocks_only`.
        """
        return num_prompt_tokens - (num_prompt_tokens % self.full_block_tokens if self.full_blocks_only else 0)


@dataclass(slots=True, eq=False)
class _Use:
    """The use of a ticket."""

    shared: bool
    """Whether by more than one request."""
    readers: list[_Consumer] = field(default_factory=list)
    """Requests that may read what it offers, or are at it, in the order in which they came."""
    tried: bool = False
    """Whether one of them has read it, or has tried to."""

    def waits(self, reader: _Consumer) -> bool:
        """Whether another one's load may soon leave less to read."""
        ahead = next(one for one in self.readers if one is reader or one.state is not ConsumerState.ABANDONED)
        return not self.tried and ahead is not reader


@dataclass(slots=True, kw_only=True, eq=False)
class _Consumer:
    request_id: str
    tickets: tuple[Ticket, ...]
    """Of one prompt, the best first."""
    use: _Use
    offered_tokens: int
    """Prompt tokens that can come from remote; 0 if the ticket's blocks cannot be of this prompt."""
    prompt: Sequence[int] | None = None
    """Token ids, for a rendezvous, whose ticket does not tell which prompt it is of."""
    state: ConsumerState = ConsumerState.EXPECTED

    @property
    def ticket(self) -> Ticket:
        return self.tickets[0]


@dataclass(slots=True, kw_only=True)
class _Producer:
    request_id: str
    num_prompt_tokens: int
    """Prompt tokens that may be offered."""
    prompt: Sequence[int] | None
    serve_id: str | None = None
    """The name that its readers know already; None once it is of no use, or if there is none."""
    saved: Save | None = None
    """The prompt's lease."""
    num_computed_tokens: int = 0
    state: ProducerState = ProducerState.COMPUTING


class PagedGroup(NamedTuple):
    """A group of layers: its facts as registered, and how many of its blocks are one of the engine's."""

    facts: GroupFacts
    split: int = 1

    def span(self, computed: int, tokens: int) -> range:
        """Which of its blocks hold what `tokens` tokens need of it, beyond the computed ones."""
        size = self.facts.block_size
        first = max(self.facts.first_needed(tokens), computed) // size
        return range(first, max(-(-tokens // size), first))

    def blocks(self, ids: Sequence[int], computed: int, tokens: int) -> tuple[int, ...]:
        """Those blocks, of a request's in the engine's table; the slot of a state if there is anything to move."""
        span, split = self.span(computed, tokens), self.split
        if self.facts.kind is GroupKind.STATE:
            return tuple(ids[-1:]) if len(span) else ()
        if split == 1:
            return tuple(ids[span.start : span.stop])
        return tuple(ids[at // split] * split + at % split for at in span if at // split < len(ids))


def registered(facts: GroupFacts, block_size: int) -> PagedGroup:
    """An engine's group with the block size that its ranks have registered."""
    split, rest = divmod(facts.block_size, max(block_size, 1))
    if rest or not split:
        what = f"group {facts.name!r}: blocks of {facts.block_size} tokens"
        raise ConfigError(f"{what}, the ranks have registered blocks of {block_size}: they do not divide them")
    return PagedGroup(msgspec.structs.replace(facts, block_size=block_size), split)


class ConnectorScheduler:
    """All requests of one engine's scheduler that concern transfers. Nothing is offered before `introduce`.

    Args:
        config: the settings it decides by.
        new_secret: makes a text that nobody can guess, another one each time.
        dialect: the form of tickets in the parameters that routers carry.
    """

    def __init__(
        self, config: SchedulingConfig, *, new_secret: Callable[[], str], dialect: Dialect = OWN_DIALECT
    ) -> None:
        self._config = config
        self._dialect = dialect
        self._new_secret = new_secret
        self._introduction: Ticket | None = None
        self._groups = tuple(PagedGroup(facts) for facts in config.all_groups)
        self._consumers: dict[str, _Consumer] = {}
        self._producers: dict[str, _Producer] = {}
        self._used: OrderedDict[tuple[str, str], _Use] = OrderedDict()
        """The tickets that have come lately, by engine and request."""
        self._next = Step()

    def __repr__(self) -> str:
        return f"<ConnectorScheduler {len(self._consumers)} consumers, {len(self._producers)} producers>"

    @property
    def open_requests(self) -> int:
        """Requests that have been added and have not ended."""
        return len(self._consumers) + len(self._producers)

    @property
    def _all_stays(self) -> bool:
        """Whether a prompt's blocks stay what they are while its request goes on."""
        return all(group.facts.whole for group in self._groups)

    def takes(self, params: Mapping[str, Any]) -> bool:
        """Tell whether a request is to come from a prefill engine.

        Args:
            params: its `kv_transfer_params`.

        Returns:
            True if they are a ticket, and this engine consumes.
        """
        return self._config.takes(params)

    def state_of(self, request_id: str) -> ConsumerState | ProducerState | None:
        """Where a request is in its life.

        Args:
            request_id: the engine's.

        Returns:
            Its state; None for a request that does not concern transfers, or not any more.
        """
        request = self._consumers.get(request_id) or self._producers.get(request_id)
        return request.state if request else None

    def blocks_held(self, request_id: str) -> bool:
        """Whether a request's blocks must stay as they are, although it may have ended for the engine.

        Args:
            request_id: the engine's.

        Returns:
            False also for a request that is not known.
        """
        state = self.state_of(request_id)
        return state is not None and request_blocks_held(state)

    def introduce(self, ticket: Ticket) -> None:
        """Say who the engine's ranks are.

        Where the ranks have registered smaller blocks than the engine's, as many of theirs are one of the engine's, one
        behind the other: what leaves here counts theirs.

        Args:
            ticket: `merge_tickets` of what `ConnectorWorker.introduction` gives on every rank.

        Raises:
            ConfigError: the ranks' groups are not as many as the engine's, or their blocks do not divide the engine's.
        """
        sizes = [group.block_size for group in ticket.groups] or [ticket.block_size]
        if len(sizes) != len(self._groups):
            raise ConfigError(f"groups: {len(self._groups)} here, the ranks have registered {len(sizes)}")
        self._groups = tuple(map(registered, self._config.all_groups, sizes))
        self._introduction, self._next.introduce = ticket, False

    def add(self, request: EngineRequest, *, sharing: Sharing = Sharing.ALONE) -> None:
        """A request has come.

        Args:
            request: what the engine knows of it.
            sharing: who else has its ticket.

        Raises:
            RequestError: its parameters are no ticket, or the ticket has come before, unless samples share it and one
                of them still needs it; PromptMismatch if it is of another prompt. The prompt is computed locally then.
            UsageError: a request of that id is there already.
        """
        if self.state_of(request.request_id) is not None:
            raise UsageError(f"request {request.request_id!r}: it is there already")
        if request.kv_transfer_params is None:
            return
        params = checks.mapping(request.kv_transfer_params, "kv_transfer_params")
        checks.text(request.request_id, "request_id")
        request_id, num_prompt_tokens = request.request_id, request.num_prompt_tokens
        if self._config.takes(params):
            ticket = self._dialect.read_ticket(params)
            known = None if ticket.awaited or ticket.num_tokens > num_prompt_tokens else request.prompt_token_ids
            if known is not None:
                check_prompt(ticket, known, f"request {request_id!r}")  # whose it is may come, so nothing is given back
            tickets = self._tickets(params, ticket, request_id)
            use = self._use(ticket, request_id, sharing)
            most = num_prompt_tokens - 1 if self._config.leaves_last_token else num_prompt_tokens
            consumer = self._expect(request_id, tickets, use)
            if ticket.awaited:  # what is the same on both sides is taken to be; the load finds out
                consumer.offered_tokens, consumer.prompt = self._config.offered_of(most), request.prompt_token_ids
                self._next.keep.append(Keep(request_id=request_id, tickets=tickets))
            elif ticket.num_tokens <= most and ticket.offered_tokens:
                consumer.offered_tokens = ticket.offered_tokens
                self._next.keep.append(Keep(request_id=request_id, tickets=tickets))
        elif self._config.offers(params):
            self._producers[request_id] = _Producer(
                request_id=request_id,
                num_prompt_tokens=max(num_prompt_tokens - self._config.withhold_last_token, 0),
                prompt=request.prompt_token_ids,
                serve_id=rendezvous_in(params),
            )

    def _expect(self, request_id: str, tickets: tuple[Ticket, ...], use: _Use) -> _Consumer:
        """A request that may read what these offer."""
        consumer = self._consumers[request_id] = _Consumer(
            request_id=request_id, tickets=tickets, use=use, offered_tokens=0
        )
        use.readers.append(consumer)
        return consumer

    def adopt(self, request_id: str, tickets: tuple[Ticket, ...]) -> None:
        """Give a prefix that peers offer to a request that has come without a ticket, or as a producer.

        Args:
            request_id: of a request that has no blocks yet.
            tickets: what each peer offers of its prompt, leased; as much by each, the best first.

        Raises:
            UsageError: the request has a ticket already.
        """
        if request_id in self._consumers:
            raise UsageError(f"request {request_id!r}: it has a ticket already")
        consumer = self._expect(request_id, tickets, _Use(shared=False))
        consumer.offered_tokens = consumer.ticket.num_tokens
        self._next.keep.append(Keep(request_id=request_id, tickets=tickets))

    def give_back(self, request_id: str, tickets: tuple[Ticket, ...], *, last: bool = True) -> None:
        """Give back what is offered to a request, which reads nothing of it any more.

        Args:
            request_id: of the request.
            tickets: what was offered.
            last: whether no other request reads it: the blocks are their producer's again at once.
        """
        if tickets[0].awaited or any(tickets[0].block_tables):
            self._next.release.append(Release(request_id=request_id, tickets=tickets, last=last))

    def _tickets(self, params: Mapping[str, Any], ticket: Ticket, request_id: str) -> tuple[Ticket, ...]:
        """All tickets of a prompt. RequestError for what is none; PromptMismatch if one is of another prompt."""
        others = tuple(map(self._dialect.read_ticket, others_in(params)))
        for other in others:
            check_alike(ticket, other, f"request {request_id!r}")
        return (ticket, *others)

    def reject(self, request: EngineRequest) -> None:
        """A request with a ticket was refused before it could be added, or is over: nobody will read what is offered.

        Its producer is told, unless a request has had the ticket.

        Args:
            request: what the engine knows of it.

        Raises:
            RequestError: its parameters are no ticket.
        """
        params = checks.mapping(request.kv_transfer_params or {}, "kv_transfer_params")
        if not self._config.takes(params):
            return
        ticket, use = self._dialect.read_ticket(params), _Use(shared=False)
        if self._used_before(ticket, use) is use:
            self.give_back(request.request_id, self._tickets(params, ticket, request.request_id))

    def _use(self, ticket: Ticket, request_id: str, sharing: Sharing) -> _Use:
        """The use of a request's ticket. RequestError if it cannot be, any more."""
        use = _Use(shared=sharing is not Sharing.ALONE)
        found = self._used_before(ticket, use)
        if found is use and sharing is Sharing.FOLLOWS:
            raise RequestError(f"request {request_id!r}: another engine uses its ticket, for another sample")
        if found is not use and not (found.shared and found.readers):
            raise RequestError(f"request {request_id!r}: another request has used its ticket")
        return found

    def _used_before(self, ticket: Ticket, use: _Use) -> _Use:
        """The use of the ticket so far; `use` if it comes for the first time."""
        key = (ticket.engine_id, ticket.request_id)
        found = self._used.setdefault(key, use)
        self._used.move_to_end(key)
        if len(self._used) > _USED_MAX:
            self._used.popitem(last=False)
        return found

    def num_new_matched_tokens(self, request_id: str, num_computed_tokens: int) -> Matched:
        """How much of a prompt can come from remote. No side effects: ask as often as you like.

        Args:
            request_id: the engine's.
            num_computed_tokens: tokens that the engine has already; they fill whole blocks.

        Returns:
            The tokens beyond those. 0 for a request that does not concern transfers, or for fewer than
            `SchedulingConfig.fetch_tokens_min`.
        """
        request = self._consumers.get(request_id)
        if request is None or request.state is not ConsumerState.EXPECTED:
            return Matched(0, False)
        tokens = request.offered_tokens - num_computed_tokens
        if tokens < self._config.fetch_tokens_min:
            return Matched(0, False)
        return Matched(None, False) if request.use.waits(request) else Matched(tokens, True)

    def update_after_alloc(self, request_id: str, block_ids: GivenTables, num_external_tokens: int) -> None:
        """A request has got blocks.

        Args:
            request_id: the engine's.
            block_ids: all of its own in prompt order, computed ones first. With several groups a table for each; a
                group with a window has null blocks in front of it, as many as are not needed, and a state's slot is the
                last of its table.
            num_external_tokens: as `num_new_matched_tokens` has given them. With 0 nothing will be read, so its
                producer is told.

        Raises:
            UsageError: it has given another number, or there are not as many tables as groups.
        """
        request = self._consumers.get(request_id)
        if request is None or request.state is not ConsumerState.EXPECTED:
            return
        if num_external_tokens == 0:
            self._consumer_fires(request, ConsumerEvent.SKIP)
            return
        offered = request.offered_tokens
        computed = offered - num_external_tokens
        tables = self._tables(block_ids)
        missing = tuple(group.blocks(ids, computed, offered) for group, ids in zip(self._groups, tables, strict=True))
        for group, ids, found in zip(self._groups, tables, missing, strict=True):
            size, needed = group.facts.block_size * group.split, group.span(computed, offered)
            if computed < 0 or (group.facts.whole and computed % size) or len(found) != len(needed):
                raise UsageError(
                    f"request {request_id!r}: {num_external_tokens} of {offered} offered tokens do not go into blocks "
                    f"of {size} tokens, of which it has {len(ids)}"
                )
        self._consumer_fires(request, ConsumerEvent.RECEIVE)
        receive = Receive(
            request_id=request_id,
            tickets=request.tickets,
            block_tables=missing,
            release_if_failed=self._config.release_failed_loads,
            shared=request.use.shared,
        )
        if request.ticket.awaited:
            known = None if request.prompt is None else tuple(request.prompt[:offered])
            receive = msgspec.structs.replace(receive, num_tokens=offered, prompt=known)
        self._next.receive.append(receive)

    def build_step(
        self,
        scheduled: Iterable[Scheduled],
        *,
        preempted: Iterable[str],
        block_ids: Callable[[str], GivenTables],
    ) -> Step:
        """What the workers do in this step.

        Args:
            scheduled: the requests of the step.
            preempted: ids of requests that have lost their blocks before it.
            block_ids: tells all blocks of a request that has some, as `update_after_alloc` takes them.

        Returns:
            The work for `ConnectorWorker.begin` on every rank; afterwards nothing of it is left here.

        Raises:
            UsageError: `block_ids` gives not as many tables as there are groups.
        """
        for request_id in preempted:
            self._preempt(request_id)
        for entry in scheduled:
            request = self._producers.get(entry.request_id)
            if request is not None:
                before, request.num_computed_tokens = request.num_computed_tokens, entry.num_computed_tokens
                self._scheduled(request, block_ids, late=0 < request.num_prompt_tokens <= before)
        self._recall_what_has_moved_on(block_ids)
        step, self._next = self._next, Step(introduce=self._next.introduce and self._introduction is None)
        step.keep = [keep for keep in step.keep if self._waits(keep)]
        step.abandon = [request_id for request_id in step.abandon if request_id in self._consumers]
        return step

    def update_from_workers(self, *, received: Iterable[str] = (), sent: Iterable[str] = ()) -> None:
        """Take what has ended on all workers. Ids that nobody waits for change nothing.

        Args:
            received: requests whose loads have ended, well or not (`Results.received`).
            sent: requests whose leases have (`Results.sent`).
        """
        for request_id in received:
            consumer = self._consumers.get(request_id)
            if consumer is not None and knows(CONSUMER_TABLE, consumer.state, ConsumerEvent.RECEIVED):
                self._consumer_fires(consumer, ConsumerEvent.RECEIVED)
        for request_id in sent:
            producer = self._producers.get(request_id)
            if producer is not None and knows(PRODUCER_TABLE, producer.state, ProducerEvent.SENT):
                self._producer_fires(producer, ProducerEvent.SENT)

    def request_finished(self, request_id: str, *, completed: bool, block_ids: GivenTables | None = None) -> Finished:
        """A request has ended for the engine.

        Args:
            request_id: the engine's.
            completed: whether by itself; else it was aborted, or has failed.
            block_ids: those that it still has. With them nothing is offered of which a block has been taken back since;
                nor is a state that has gone on with the request's answer.

        Returns:
            What the router gets, and whether the blocks must stay: with `hold_blocks` they are the engine's again when
            the request is reported as sent, or as received.

        Raises:
            UsageError: there are not as many tables as groups.
        """
        finished = Finished(False, None)
        if request_id in self._consumers:
            finished = self._consumer_finished(self._consumers[request_id])
        if request_id in self._producers:  # maybe with a prefix that a peer has offered
            request = self._producers[request_id]
            holds, params = self._producer_finished(request, completed and self._has_prompt(request, block_ids))
            finished = Finished(holds or finished.hold_blocks, params)
        return finished

    def forget_ranks(self) -> None:
        """The ranks are about to register their caches anew, as after a sleep: tickets of before name ranks of before.

        Nothing is offered until they are introduced again, which the next step asks the workers for.
        """
        self._introduction = None
        self._next.introduce = True

    def withdraw_all(self) -> None:
        """End every lease that somebody may read: what the blocks hold is not to be read any more."""
        for request in self._producers.values():
            if request.state is ProducerState.FLOWING:
                self._recall(request)
        self._next.withdraw += (
            request.request_id for request in self._producers.values() if request.state is ProducerState.SENDING
        )

    def _waits(self, keep: Keep) -> bool:
        """Whether its request has no blocks yet, and is no other one of the same name."""
        request = self._consumers.get(keep.request_id)
        return request is not None and request.state is ConsumerState.EXPECTED and request.tickets is keep.tickets

    def _consumer_finished(self, request: _Consumer) -> Finished:
        self._consumer_fires(request, ConsumerEvent.END)
        if request.state is ConsumerState.ABANDONED:
            self._next.abandon.append(request.request_id)
        return Finished(request_blocks_held(request.state), None)

    def _producer_finished(self, request: _Producer, completed: bool) -> Finished:
        save, ttl_s = request.saved, self._config.lease_ttl_s
        flows = request.state is ProducerState.FLOWING
        if flows and request.num_computed_tokens < request.num_prompt_tokens:
            completed = False
        if save is None or self._introduction is None or not completed:
            if flows:
                return self._broken_off(request)
            self._producer_fires(request, ProducerEvent.END)
            self._withdraw(request)
            self._decline(request, "the request has ended before its prompt was computed")
            return Finished(False, None)
        ticket = self._introduction.without_leases(
            request_id=save.serve_id,
            block_ids=given_block_ids(save.block_tables),
            num_tokens=save.num_tokens,
            ttl_s=ttl_s,
            prompt_digest=""
            if request.prompt is None
            else prompt_digest(save.serve_id, request.prompt[: save.num_tokens]),
        )
        if any(save.block_tables):
            self._producer_fires(request, ProducerEvent.SEND)
            self._next.send.append(Send(request_id=request.request_id))
        else:
            self._producer_fires(request, ProducerEvent.END)  # nothing to read, so nothing to wait for
        return Finished(request_blocks_held(request.state), self._dialect.params_of(ticket))

    def _broken_off(self, request: _Producer) -> Finished:
        """What flows has ended early: its readers are told, and its blocks stay until they cannot succeed any more."""
        self._producer_fires(request, ProducerEvent.SEND)
        self._next.send.append(Send(request_id=request.request_id))
        self._next.withdraw.append(request.request_id)
        return Finished(request_blocks_held(request.state), None)

    def _decline(self, request: _Producer, reason: str) -> None:
        """Nobody need wait for this prompt, if anybody does."""
        serve_id, request.serve_id = request.serve_id, None
        if serve_id is not None:
            self._next.decline.append(Decline(serve_id=serve_id, reason=reason))

    def _has_prompt(self, request: _Producer, block_ids: GivenTables | None) -> bool:
        """Whether a saved prompt's blocks are where they were, as far as is known, and its state is that of its end."""
        save = request.saved
        if save is None or (self._config.has_state and request.num_computed_tokens > save.num_tokens):
            return False
        return block_ids is None or self._prompt_blocks(self._tables(block_ids), save.num_tokens) == save.block_tables

    def _prompt_blocks(self, tables: Sequence[Sequence[int]], tokens: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of a request's tables that are offered of a prompt of so many tokens."""
        return tuple(group.blocks(ids, 0, tokens) for group, ids in zip(self._groups, tables, strict=True))

    def _tables(self, block_ids: GivenTables) -> tuple[Sequence[int], ...]:
        """A table for each group. UsageError if there are more or fewer."""
        groups = self._config.groups
        nested = len(block_ids) > 0 and not isinstance(block_ids[0], int)
        tables = tuple(block_ids) if nested or len(groups) > 1 else (block_ids,)
        if len(tables) != max(len(groups), 1) or (len(groups) > 1 and not nested):
            raise UsageError(f"block_ids: expected a table for each of {max(len(groups), 1)} groups, got {len(tables)}")
        return cast("tuple[Sequence[int], ...]", tables)

    def _preempt(self, request_id: str) -> None:
        request = self._producers.get(request_id)
        if request is not None:
            request.num_computed_tokens = 0
        if request is not None and request.state is ProducerState.SAVED:
            self._producer_fires(request, ProducerEvent.PREEMPT)
            self._withdraw(request)
        elif request is not None and request.state is ProducerState.FLOWING:
            self._recall(request)
        elif request is not None and request_id in self._next.withdraw:
            self._next.recall.append(request_id)  # it was preempted first, and has ended since

    def _recall_what_has_moved_on(self, block_ids: Callable[[str], GivenTables]) -> None:
        """A prompt that flows and goes on with its answer may lose blocks of windows, also in a step without it."""
        if self._all_stays:
            return
        for request in self._producers.values():
            complete = request.num_computed_tokens >= request.num_prompt_tokens
            flows = request.state is ProducerState.FLOWING
            if flows and complete and not self._has_prompt(request, block_ids(request.request_id)):
                self._recall(request)

    def _recall(self, request: _Producer) -> None:
        """What flows is not to be read any more, and readers may be at it. If it is computed once more that is for
        nobody who waits now.
        """
        self._producer_fires(request, ProducerEvent.PREEMPT)
        self._next.recall.append(request.request_id)
        request.saved = request.serve_id = None

    def _scheduled(self, request: _Producer, block_ids: Callable[[str], GivenTables], *, late: bool) -> None:
        """A step computes more of a request; `late` if its prompt was complete before.

        Then nothing is offered for the first time where windows may have moved on since, or a state has.
        """
        computing = request.state is ProducerState.COMPUTING
        if self._introduction is None or not (computing or request.state is ProducerState.FLOWING):
            return
        if computing and late and not self._all_stays:
            return
        complete = request.num_computed_tokens >= request.num_prompt_tokens
        if request.serve_id is not None and computing:
            self._flow(request, block_ids(request.request_id), request.serve_id)
        elif request.saved is not None:
            self._grow(request, request.saved, block_ids(request.request_id))
        elif complete:
            self._save(request, block_ids(request.request_id))

    def _save(self, request: _Producer, block_ids: GivenTables) -> None:
        tokens = self._config.offered_of(request.num_prompt_tokens)
        save = Save(
            request_id=request.request_id,
            serve_id=f"{self._dialect.shown_id(name_of(request.request_id))}#{self._new_secret()}",
            block_tables=self._prompt_blocks(self._tables(block_ids), tokens),
            num_tokens=tokens,
            ttl_s=self._config.lease_ttl_s,
        )
        request.saved = save
        self._producer_fires(request, ProducerEvent.SAVE)
        if any(save.block_tables):
            self._next.save.append(save)

    def _flow(self, request: _Producer, block_ids: GivenTables, serve_id: str) -> None:
        """Open the lease of a prompt that is read while it is computed."""
        tokens = self._config.offered_of(request.num_prompt_tokens)
        if tokens == 0:
            self._decline(request, f"of {request.num_prompt_tokens} tokens nothing is offered: full blocks only")
            return
        known = None if request.prompt is None else tuple(request.prompt[:tokens])
        request.saved = Save(
            request_id=request.request_id,
            serve_id=serve_id,
            block_tables=self._blocks_so_far(request, block_ids, tokens),
            num_tokens=tokens,
            ttl_s=self._config.lease_ttl_s,
            computed_tokens=min(request.num_computed_tokens, tokens),
            prompt=known,
        )
        self._producer_fires(request, ProducerEvent.FLOW)
        self._next.save.append(request.saved)

    def _grow(self, request: _Producer, save: Save, block_ids: GivenTables) -> None:
        """More of a prompt that flows is there after this step."""
        tables = self._blocks_so_far(request, block_ids, save.num_tokens)
        computed = min(request.num_computed_tokens, save.num_tokens)
        if computed == save.computed_tokens:
            return
        more = tuple(now[len(before) :] for before, now in zip(save.block_tables, tables, strict=True))
        request.saved = msgspec.structs.replace(save, block_tables=tables, computed_tokens=computed)
        self._next.grow.append(Grow(request_id=request.request_id, block_tables=more, num_tokens=computed))

    def _blocks_so_far(self, request: _Producer, block_ids: GivenTables, tokens: int) -> BlockTables:
        """Of a prompt's blocks those that it has by now. The slot of a state is the last token's."""
        complete = request.num_computed_tokens >= tokens
        tables = self._prompt_blocks(self._tables(block_ids), tokens)
        groups = zip(self._groups, tables, strict=True)
        return tuple(ids if complete or group.facts.kind is not GroupKind.STATE else () for group, ids in groups)

    def _withdraw(self, request: _Producer) -> None:
        """End the lease of a prompt whose ticket nobody has."""
        save, request.saved = request.saved, None
        if save is not None and any(save.block_tables):
            self._next.withdraw.append(request.request_id)

    def _consumer_fires(self, request: _Consumer, event: ConsumerEvent) -> None:
        before, request.state = request.state, fire(CONSUMER_TABLE, request.state, event)
        if request in request.use.readers and request.state in (ConsumerState.LOCAL, ConsumerState.ENDED):
            self._has_done(request, unread=before is ConsumerState.EXPECTED)
        if request.state is ConsumerState.ENDED:
            del self._consumers[request.request_id]

    def _has_done(self, request: _Consumer, *, unread: bool) -> None:
        """A request needs nothing of its ticket any more. A load that is not shared tells the producer by itself."""
        use = request.use
        use.readers.remove(request)
        use.tried = use.tried or not unread or request.state is ConsumerState.LOCAL
        if unread or (use.shared and not use.readers):
            self.give_back(request.request_id, request.tickets, last=not use.readers)

    def _producer_fires(self, request: _Producer, event: ProducerEvent) -> None:
        request.state = fire(PRODUCER_TABLE, request.state, event)
        if request.state is ProducerState.ENDED:
            del self._producers[request.request_id]
