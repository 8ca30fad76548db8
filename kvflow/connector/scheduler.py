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
of each, `consumers` and `producers` are the books that keep them. A ticket is used once: whatever becomes of the load,
after it the prompt is computed locally, also that of another request with the same ticket, such as another try.
Whether a failed load fails its request or is recomputed is the engine's policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from kvflow import checks
from kvflow.checks import counted
from kvflow.connector.consumers import ConsumerBook
from kvflow.connector.paged_groups import PagedGroup, PagedGroups
from kvflow.connector.parameters import OWN_DIALECT, Dialect
from kvflow.connector.prefix_questions import PrefixQuestions
from kvflow.connector.producers import ProducerBook
from kvflow.connector.request_states import ConsumerState, ProducerState, request_blocks_held
from kvflow.connector.scheduling_config import SchedulingConfig
from kvflow.connector.step import EngineRequest, Finished, GivenTables, Matched, Sharing, Step, TablesOf
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import PromptMismatch, UsageError

__all__ = [
    "ConnectorScheduler",
    "EngineRequest",
    "Finished",
    "PagedGroup",
    "SchedulingConfig",
    "Sharing",
]


class ConnectorScheduler:
    """All requests of one engine's scheduler that concern transfers. Nothing is offered before `introduce`.

    Args:
        config: the settings it decides by.
        new_secret: makes a text that nobody can guess, another one each time.
        dialect: the form of tickets in the parameters that routers carry.
        questions: whose prefixes peers are asked for; without it nobody is asked.
    """

    def __init__(
        self,
        config: SchedulingConfig,
        *,
        new_secret: Callable[[], str],
        dialect: Dialect = OWN_DIALECT,
        questions: PrefixQuestions | None = None,
    ) -> None:
        self._config = config
        self._groups = PagedGroups(config.all_groups)
        self._questions = questions or PrefixQuestions((), block_tokens=config.block_size, tokens_min=1)
        self._consumers = ConsumerBook(config, self._groups, dialect)
        self._producers = ProducerBook(config, self._groups, dialect, new_secret)

    def __repr__(self) -> str:
        consumers = counted(len(self._consumers), "consumer")
        return f"<ConnectorScheduler {consumers}, {counted(len(self._producers), 'producer')}>"

    @property
    def open_requests(self) -> int:
        """Requests that have been added and have not ended."""
        return len(self._consumers) + len(self._producers)

    def state_of(self, request_id: str) -> ConsumerState | ProducerState | None:
        """Tell where a request is in its life.

        Args:
            request_id: the engine's.

        Returns:
            Its state; None for a request that does not concern transfers, or not any more.
        """
        return self._consumers.state_of(request_id) or self._producers.state_of(request_id)

    def blocks_held(self, request_id: str) -> bool:
        """Tell whether a request's blocks must stay as they are, although it may have ended for the engine.

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
        self._groups.register([group.block_size for group in ticket.groups] or [ticket.block_size])
        self._producers.introduce(ticket)

    def forget_ranks(self) -> None:
        """Offer nothing until the ranks are introduced again, which the next step asks the workers for.

        For ranks that are about to register their caches anew, as after a sleep: tickets of before name ranks of
        before.
        """
        self._producers.introduce(None)

    def add(self, request: EngineRequest, *, sharing: Sharing = Sharing.ALONE) -> None:
        """Take a request that has come.

        Args:
            request: what the engine knows of it.
            sharing: who else has its ticket.

        Raises:
            RequestError: its parameters are no ticket, or the ticket has come before, unless samples share it and one
                of them still needs it; PromptMismatch if it is of other tokens. The prompt is computed locally then.
                Of a ticket of the same tokens with other pictures, another adapter or the like nothing is raised: the
                request must not be computed (`refusal`), and has a load that fails.
            UsageError: a request of that id is there already.
        """
        if self.state_of(request.request_id) is not None:
            raise UsageError(f"request {request.request_id!r}: it is there already")
        if request.kv_transfer_params is None:
            return
        params = checks.mapping(request.kv_transfer_params, "kv_transfer_params")
        checks.text(request.request_id, "request_id")
        if self._config.takes(params):
            self._consumers.add(request, params, sharing)
        elif self._config.offers(params):
            self._producers.add(request, params)
        elif "remote_block_ids" in params:
            asks = params.get("do_remote_prefill")
            self.note_computed_here("this engine loads nothing" if asks else "its do_remote_prefill is not true")

    def note_computed_here(self, reason: str) -> None:
        """Count a request with a ticket whose prompt is computed here for a reason that only the engine knows.

        Those that `add` refuses are counted already. While there are some, one line a minute tells how many, and why.

        Args:
            reason: what follows "because" in that line.
        """
        self._consumers.computed_here[reason] += 1

    def refusal(self, request_id: str) -> PromptMismatch | None:
        """Tell whether a request has to fail, since its prompt is not what its ticket's is but for the tokens.

        A router may have taken its pictures off, say: computed here, it would be answered as if there were none. An
        engine fails the request at once, or gives it blocks: then its load fails with the same error.

        Args:
            request_id: the engine's.

        Returns:
            The error; None for any other request.
        """
        return self._consumers.refusal(request_id)

    def refuse(self, refused: Iterable[tuple[str, PromptMismatch]]) -> None:
        """Take what loads have found out: where a prompt is named before it is computed, its ticket cannot tell.

        Args:
            refused: `Results.refused` of the workers; `refusal` tells the engine of them from then on. Ids that are
                not known change nothing.
        """
        self._consumers.refuse(refused)

    def adopt(self, request_id: str, tickets: tuple[Ticket, ...]) -> None:
        """Give a prefix that peers offer to a request that has come without a ticket, or as a producer.

        Args:
            request_id: of a request that has no blocks yet.
            tickets: what each peer offers of its prompt, leased; as much by each, the best first.

        Raises:
            UsageError: the request has a ticket already.
        """
        self._consumers.adopt(request_id, tickets)

    def give_back(self, request_id: str, tickets: tuple[Ticket, ...], *, last: bool = True) -> None:
        """Give back what is offered to a request, which reads nothing of it any more.

        Args:
            request_id: of the request.
            tickets: what was offered.
            last: whether no other request reads it: the blocks are their producer's again at once.
        """
        self._consumers.give_back(request_id, tickets, last=last)

    def reject(self, request: EngineRequest) -> None:
        """Give back the ticket of a request that was refused before it could be added, or is over.

        Its producer is told, unless a request has had the ticket.

        Args:
            request: what the engine knows of it.

        Raises:
            RequestError: its parameters are no ticket.
        """
        params = checks.mapping(request.kv_transfer_params or {}, "kv_transfer_params")
        if self._config.takes(params):
            self._consumers.reject(request, params)

    def num_new_matched_tokens(self, request_id: str, num_computed_tokens: int) -> Matched:
        """Tell how much of a prompt can come from remote. Ask as often as you like: peers are asked once.

        Args:
            request_id: the engine's.
            num_computed_tokens: tokens that the engine has already; they fill whole blocks.

        Returns:
            The tokens beyond those; None while the request waits for peers' answers, or for another request's load. 0
            for a request that does not concern transfers, or for fewer than `SchedulingConfig.fetch_tokens_min`.
        """
        if self._questions.waits(request_id, num_computed_tokens):
            return None, False
        return self._consumers.match(request_id, num_computed_tokens)

    def update_after_alloc(self, request_id: str, block_ids: GivenTables, num_external_tokens: int) -> None:
        """Take the blocks that a request has got.

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
        self._consumers.allocated(request_id, block_ids, num_external_tokens)
        if num_external_tokens == 0:
            self._questions.over(request_id)

    def build_step(self, scheduled: Mapping[str, int], *, preempted: Iterable[str], block_ids: TablesOf) -> Step:
        """Give what the workers do in this step.

        Args:
            scheduled: the requests of the step, and how many tokens of each are computed once the step is.
            preempted: ids of requests that have lost their blocks before it.
            block_ids: tells all blocks of a request that has some, as `update_after_alloc` takes them.

        Returns:
            The work for `ConnectorWorker.begin` on every rank; afterwards nothing of it is left here.

        Raises:
            UsageError: `block_ids` gives not as many tables as there are groups.
        """
        self._consumers.computed_here.tell()
        step = self._producers.build_step(scheduled, preempted, block_ids)
        self._consumers.add_to(step)
        step.questions = self._questions.take()
        return step

    def update_from_workers(
        self,
        *,
        received: Collection[str] = (),
        sent: Iterable[str] = (),
        found: Mapping[str, tuple[Ticket, ...]] = MappingProxyType({}),
    ) -> None:
        """Take what has ended on all workers. Ids that nobody waits for change nothing.

        Args:
            received: requests whose loads have ended, well or not (`Results.received`).
            sent: requests whose leases have (`Results.sent`).
            found: what peers offer to requests (`Results.found`), which is a request's ticket, or is given back.
        """
        self._consumers.received(received)
        self._producers.sent(sent)
        for request_id in received:
            self._questions.over(request_id)
        for request_id, tickets in found.items():
            waits = self._questions.answered(request_id, found=bool(tickets))
            if tickets:
                (self.adopt if waits else self.give_back)(request_id, tickets)

    def request_finished(self, request_id: str, *, completed: bool, block_ids: GivenTables | None = None) -> Finished:
        """Take the end of a request for the engine.

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
        self._questions.finished(request_id)
        written = self._consumers.finish(request_id)  # a producer's too, with a prefix that a peer has offered
        read = self._producers.finish(request_id, completed=completed, block_ids=block_ids)
        return Finished(written or read.hold_blocks, read.params)

    def withdraw_all(self) -> None:
        """End every lease that somebody may read: what the blocks hold is not to be read any more."""
        self._producers.withdraw_all()
