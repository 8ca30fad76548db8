"""Requests that load their prompts: with a router's tickets, or with a prefix that peers offer.

A request is added, then the engine asks how many of its tokens can be loaded (`match`), and then gives it blocks. The
request waits for its load, or goes on without a load. Until it has blocks, the leases of its tickets are kept open
(`Step.keep`). The producers are always notified, once no request needs the tickets: by a `Release`, or by the load.

A ticket is used by one request, or by several samples of one prompt. The first sample's load serves all samples: the
others wait for it, find part of the prompt in the engine's prefix cache, and each load the rest. If the first sample is
aborted, the next takes its place. Once a sample has read the offer, or has tried to, no sample waits. The last sample
that needs the ticket notifies the producer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvflow.connector.computed_here import ComputedHere
from kvflow.connector.paged_groups import PagedGroups
from kvflow.connector.parameters import Dialect, other_params_in
from kvflow.connector.request_states import CONSUMER_TABLE, ConsumerEvent, ConsumerState, request_blocks_held
from kvflow.connector.scheduling_config import SchedulingConfig
from kvflow.connector.step import EngineRequest, GivenTables, Matched, Receive, Release, Sharing, Step
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.policy.states import allows, fire
from kvflow.core.protocol.prompts import check_prompt, check_same_prompt, marks_of
from kvflow.core.protocol.ticket import Ticket, check_weights
from kvflow.errors import TOKENS, PromptMismatch, RequestError, UsageError
from kvflow.logs import logger_of

logger = logger_of(__name__)

_USED_TICKETS_MAX = 1 << 14


@dataclass(slots=True, kw_only=True, eq=False)
class _Consumer:
    request_id: str
    tickets: tuple[Ticket, ...]
    """Tickets for the request's prompt. If a load with one fails, the next is tried."""
    use: _TicketUse
    offered_tokens: int = 0
    """Number of prompt tokens that the first ticket offers or, if pending, is expected to offer. 0 if the offer has no
    blocks, or has more tokens than this engine can load: then nothing is loaded."""
    prompt: Sequence[int] | None = None
    """The prompt's token ids, if a ticket is pending and the engine knows the ids; else None. A pending ticket does not
    say which prompt it is for, so the load compares prompts."""
    refusal: PromptMismatch | None = None
    """Error with which the request must fail, without using its tickets and without computing the prompt locally; or
    None."""
    awaits_offer: bool = False
    """True while the request must get no blocks, because its first ticket is pending (`late_blocks`)."""
    state: ConsumerState = ConsumerState.EXPECTED

    @property
    def ticket(self) -> Ticket:
        return self.tickets[0]


@dataclass(slots=True, eq=False)
class _TicketUse:
    """All requests of this engine that use one ticket."""

    shared: bool
    """True if the ticket may be shared by several samples of one prompt."""
    readers: list[_Consumer] = field(default_factory=list)
    """Requests that are loading the offered blocks, or may still load them, in order of arrival."""
    load_tried: bool = False
    """True once a request with the ticket has loaded the blocks, has tried to, or was computed locally."""

    def must_wait(self, reader: _Consumer) -> bool:
        """Return True if `reader` must wait for an earlier request's load with the same ticket.

        That load fills the engine's prefix cache, so `reader` may have less to load.
        """
        ahead = next(other for other in self.readers if other is reader or other.state is not ConsumerState.ABANDONED)
        return not self.load_tried and ahead is not reader

    def remove_reader(self, reader: _Consumer, *, unread: bool) -> bool:
        """Remove `reader`, which no longer needs the ticket. Return True if the workers must release the ticket.

        `unread`: `reader` has not begun to load; then return True. After a load with an unshared ticket return False,
        since the load notifies the producer. After a load with a shared ticket return True only for the last reader.
        """
        self.readers.remove(reader)
        self.load_tried = self.load_tried or not unread or reader.state is ConsumerState.LOCAL
        return unread or (self.shared and not self.readers)


class ConsumingRequests:
    """All requests of an engine that may load their prompts, and the workers' next work for them."""

    def __init__(self, config: SchedulingConfig, groups: PagedGroups, dialect: Dialect) -> None:
        self.computed_here = ComputedHere()
        """Number of requests that have a ticket but are computed locally, by reason."""
        self._config = config
        self._groups = groups
        self._dialect = dialect
        self._requests: dict[str, _Consumer] = {}
        self.weights = ""
        """Version of the engine's weights (`ConnectorScheduler.set_weights`)."""
        self._uses = BoundedMap[tuple[str, str], _TicketUse](_USED_TICKETS_MAX)
        """Requests that use each of the latest tickets from routers, by the ticket's engine id and request id."""
        self._next_step = Step()

    def __len__(self) -> int:
        return len(self._requests)

    def state_of(self, request_id: str) -> ConsumerState | None:
        """Return the state of a request, or None if the request has ended or never had a ticket."""
        request = self._requests.get(request_id)
        return None if request is None else request.state

    def add(self, request: EngineRequest, params: Mapping[str, Any], sharing: Sharing) -> None:
        """Add a request that may load its prompt with the tickets in `params`, its `kv_transfer_params`.

        RequestError if `params` are not a ticket, or if the ticket is used already; PromptMismatch if the ticket is for
        other tokens; WeightsMismatch if the blocks of all tickets were computed with other weights.
        """
        what, prompt = f"request {request.request_id!r}", request.prompt_token_ids
        reason = "its parameters are not a ticket"
        try:
            tickets = self._tickets(params, what)
            reason = "its ticket is of other weights"
            tickets = self._of_our_weights(request.request_id, tickets)
            reason = "its ticket is for another prompt"
            fits = tickets[0].num_tokens <= request.num_prompt_tokens
            if prompt is not None and fits and self._refuse_mismatch(request, tickets, prompt, what):
                return
            reason = "its ticket is used by another request"
            consumer = self._expect(request.request_id, tickets, self._use_of(tickets[0], sharing, what))
        except RequestError:
            self.computed_here[reason] += 1
            raise
        ticket = tickets[0]
        most = request.num_prompt_tokens - self._config.leaves_last_token
        if any(one.awaited for one in tickets):  # assume that the prompts agree, which the load will check
            consumer.prompt = prompt
        if ticket.awaited:
            consumer.offered_tokens = self._config.offered_of(most)
            consumer.awaits_offer = self._config.late_blocks
        elif ticket.num_tokens <= most and ticket.offered_tokens:
            consumer.offered_tokens = ticket.offered_tokens
        elif ticket.num_tokens > most:
            logger.warning(
                "%s: its prompt is computed here: the ticket of request %r has num_tokens %s, of which this prompt "
                "can load at most %s",
                what,
                ticket.request_id,
                ticket.num_tokens,
                most,
            )
            self.computed_here["its ticket offers more tokens than the prompt has"] += 1
        else:
            self.computed_here["its ticket offers no blocks"] += 1
        if ticket.awaited or consumer.offered_tokens:
            self._next_step.keep[request.request_id] = tickets

    def _of_our_weights(self, request_id: str, tickets: tuple[Ticket, ...]) -> tuple[Ticket, ...]:
        """Return the tickets with blocks of this engine's weights, and those that do not say. Give the others back.

        Pending tickets, whose blocks are not computed yet, and those of stock engines do not say. WeightsMismatch if no
        ticket is left.
        """
        known = [ticket for ticket in tickets if ticket.leases_can_be_asked and not ticket.awaited]
        others = [ticket for ticket in known if ticket.first.weights != self.weights]
        for ticket in others:  # no request of this engine can use them
            self._give_back_new(request_id, (ticket,))
        if len(others) == len(tickets):
            check_weights(tickets[0], tickets[0].first, self.weights)
        return tuple(ticket for ticket in tickets if ticket not in others) if others else tickets

    def _give_back_new(self, request_id: str, tickets: tuple[Ticket, ...]) -> None:
        """Have the next step release `tickets`, unless another request has used the first of them."""
        use = _TicketUse(shared=False)
        if self._setdefault_use(tickets[0], use) is use:
            self.give_back(request_id, tickets)

    def _refuse_mismatch(
        self, request: EngineRequest, tickets: tuple[Ticket, ...], prompt: Sequence[int], what: str
    ) -> bool:
        """Compare the prompts of `tickets` with `prompt`, the request's token ids. Return False if none differs.

        If a ticket's prompt has the tokens of `prompt` but, for example, other pictures, record a refusal of the
        request and return True. PromptMismatch, with a message that begins with `what`, if the tokens differ, or if the
        prompt of an earlier ticket agrees. Release no ticket: the request that a ticket is meant for may still come.
        """
        agreed = False
        for ticket in tickets:
            try:
                if not ticket.awaited:
                    check_prompt(ticket, prompt, what)
            except PromptMismatch as error:
                if agreed or error.parts == TOKENS:
                    raise
                self._requests[request.request_id] = _Consumer(
                    request_id=request.request_id,
                    tickets=(ticket,),
                    use=_TicketUse(shared=True),
                    offered_tokens=ticket.offered_tokens,
                    prompt=prompt,
                    refusal=error,
                )
                return True
            agreed = agreed or len(ticket.prompt_digest) > 0
        return False

    def _use_of(self, ticket: Ticket, sharing: Sharing, what: str) -> _TicketUse:
        """Return the `_TicketUse` of a new request's ticket. If the ticket is new, record its `_TicketUse`.

        RequestError, with a message that begins with `what`, if the ticket is used up or not shared, or if another
        engine uses it.
        """
        use = _TicketUse(shared=sharing is not Sharing.ALONE)
        recorded = self._setdefault_use(ticket, use)
        if recorded is use and sharing is Sharing.SAMPLES_ELSEWHERE:
            raise RequestError(f"{what}: another engine uses its ticket, for another sample")
        if recorded is not use and not (recorded.shared and recorded.readers):
            raise RequestError(f"{what}: another request has used its ticket")
        return recorded

    def _setdefault_use(self, ticket: Ticket, use: _TicketUse) -> _TicketUse:
        """Return the recorded `_TicketUse` of `ticket`. If the ticket is new, record `use` and return it."""
        key = (ticket.engine_id, ticket.request_id)
        recorded = self._uses[key] = self._uses.get(key, use)
        return recorded

    def refusal(self, request_id: str) -> PromptMismatch | None:
        """Return the error with which a request must fail if the ticket's prompt has, for example, other pictures.

        The tokens of both prompts are the same. None for any other request.
        """
        request = self._requests.get(request_id)
        return None if request is None else request.refusal

    def refuse(self, refused: Iterable[tuple[str, PromptMismatch]]) -> None:
        """Record, for each request id in `refused`, the error with which the request must fail.

        Loads have found these errors. Ignore unknown ids.
        """
        for request_id, error in refused:
            request = self._requests.get(request_id)
            if request is not None:
                request.refusal = error

    def adopt(self, request_id: str, tickets: tuple[Ticket, ...]) -> None:
        """Add a request that may load a prefix of its prompt with `tickets`, which peers have offered when asked.

        UsageError if the request has a ticket already.
        """
        if request_id in self._requests:
            raise UsageError(f"request {request_id!r}: it has a ticket already")
        consumer = self._expect(request_id, tickets, _TicketUse(shared=False))
        consumer.offered_tokens = consumer.ticket.num_tokens
        self._next_step.keep[request_id] = tickets

    def reject(self, request: EngineRequest, params: Mapping[str, Any]) -> None:
        """Have the next step release the tickets in `params`, unless another request has used them.

        `request` was refused before it was added, or has ended. RequestError if `params` are not a ticket.
        """
        self._give_back_new(request.request_id, self._tickets(params, f"request {request.request_id!r}"))

    def give_back(self, request_id: str, tickets: tuple[Ticket, ...], *, last: bool = True) -> None:
        """Have the next step release `tickets`, since a request will not read their blocks.

        `last`: no other request needs the tickets, so their producers are notified. Tickets without blocks are ignored.
        """
        if tickets[0].awaited or any(tickets[0].block_tables):
            self._next_step.release.append(Release(request_id=request_id, tickets=tickets, last=last))

    def match(self, request_id: str, num_computed_tokens: int) -> Matched:
        """Return how many prompt tokens a request can load after its first `num_computed_tokens`, which are cached.

        Return None in place of the number if the request has to wait for another request's load, or for its offer.
        """
        request = self._expected_request(request_id)
        tokens = 0 if request is None else request.offered_tokens - num_computed_tokens
        if request is not None and request.refusal is not None:
            return max(tokens, 1), True  # whatever the local cache has: the request waits for a load, which fails
        if request is None or tokens < self._config.fetch_tokens_min:
            return 0, False
        return (None, False) if request.awaits_offer or request.use.must_wait(request) else (tokens, True)

    def update_after_alloc(self, request_id: str, block_ids: GivenTables, num_external_tokens: int) -> None:
        """Have the next step load a request's last `num_external_tokens` offered tokens into the blocks `block_ids`.

        If `num_external_tokens` is 0, the request is computed locally. UsageError if the blocks do not fit the tokens.
        """
        request = self._expected_request(request_id)
        if request is None:
            return
        if num_external_tokens == 0:
            self._fire(request, "skip")
            return
        offered, refused, missing = request.offered_tokens, request.refusal is not None, self._groups.empty_tables
        if not refused:
            missing = self._groups.missing_blocks(block_ids, offered, num_external_tokens, f"request {request_id!r}")
        self._fire(request, "receive")
        compared = max(offered, *(ticket.num_tokens for ticket in request.tickets))  # digests cover all these tokens
        prompt = None if request.prompt is None else request.prompt[:compared]
        receive = Receive(
            request_id=request_id,
            tickets=request.tickets,
            block_tables=missing,
            num_tokens=offered,
            cached_tokens=max(offered - num_external_tokens, 0),
            prompt=None if prompt is None else tuple(prompt),
            marks=marks_of(prompt),
            release_if_failed=self._config.release_failed_loads and not refused,
            shared=request.use.shared,
        )
        self._next_step.receive.append(receive)

    def add_to_step(self, step: Step) -> None:
        """Set in `step` what was decided since the last step: leases to keep, loads to start or cancel, releases."""
        ours, self._next_step = self._next_step, Step()
        step.keep = {name: tickets for name, tickets in ours.keep.items() if self._still_waits(name, tickets)}
        step.await_offers = [request_id for request_id in step.keep if self._requests[request_id].awaits_offer]
        step.receive, step.release = ours.receive, ours.release
        step.abandon = [request_id for request_id in ours.abandon if request_id in self._requests]

    def note_offered(self, request_ids: Iterable[str]) -> None:
        """Record that these requests' prompts are offered, or never will be: they may get blocks. Ignore other ids."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                request.awaits_offer = False

    def note_received(self, request_ids: Iterable[str]) -> None:
        """Record that these requests' loads have ended, successfully or not. Ignore other ids."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and allows(CONSUMER_TABLE, request.state, "received"):
                self._fire(request, "received")

    def finish(self, request_id: str) -> bool:
        """Record that the engine has ended a request. Return True if a load may still write to the request's blocks."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._fire(request, "end")
        if request.state is ConsumerState.ABANDONED:
            self._next_step.abandon.append(request_id)
        return request_blocks_held(request.state)

    def _tickets(self, params: Mapping[str, Any], what: str) -> tuple[Ticket, ...]:
        """Read all tickets from `params`. RequestError if one is invalid, PromptMismatch if their prompts differ."""
        first, *others = map(self._dialect.read_ticket, (params, *other_params_in(params)))
        for other in others:
            check_same_prompt(first, other, what)
        return (first, *others)

    def _expect(self, request_id: str, tickets: tuple[Ticket, ...], use: _TicketUse) -> _Consumer:
        """Record a new request in state EXPECTED that may load with `tickets`. Add it to `use.readers`. Return it."""
        consumer = self._requests[request_id] = _Consumer(request_id=request_id, tickets=tickets, use=use)
        use.readers.append(consumer)
        return consumer

    def _expected_request(self, request_id: str) -> _Consumer | None:
        """Return the request with this id if it has no blocks yet (state EXPECTED), else None."""
        request = self._requests.get(request_id)
        return request if request is not None and request.state is ConsumerState.EXPECTED else None

    def _still_waits(self, request_id: str, tickets: tuple[Ticket, ...]) -> bool:
        """Return True if the request still has no blocks, and was added with this very tuple `tickets`."""
        request = self._expected_request(request_id)
        return request is not None and request.tickets is tickets

    def _fire(self, request: _Consumer, event: ConsumerEvent) -> None:
        before, request.state = request.state, fire(CONSUMER_TABLE, request.state, event)
        needs_nothing = request.state in (ConsumerState.LOCAL, ConsumerState.ENDED)
        if needs_nothing and request in request.use.readers:
            use = request.use
            if use.remove_reader(request, unread=before is ConsumerState.EXPECTED):
                self.give_back(request.request_id, request.tickets, last=not use.readers)
        if request.state is ConsumerState.ENDED:
            del self._requests[request.request_id]
