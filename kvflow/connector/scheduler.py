"""The scheduler's half of a connector, for any engine: which prompts are loaded, and the work of each step.

An engine's scheduler calls a `ConnectorScheduler`, which decides without waiting and hands the work to the engine's
workers as a `Step`. In the order of a request's life:

    add                      a request has arrived
    num_new_matched_tokens   how many tokens of its prompt can be loaded? may be asked again and again
    update_after_alloc       the request has blocks now
    build_step               the work of the workers in this step
    update_from_workers      what the workers have finished
    request_finished         may its blocks be freed, and what does the router get?

A request consumes (its parameters are a ticket) or produces (`do_remote_decode`). `connector.request_states` has the
states of both; `consumers` and `producers` hold the requests. A ticket is used once. Whatever becomes of its load,
afterwards the prompt is computed locally, also for another request with the same ticket, for example a retry. If a load
fails, the engine decides whether its request fails or is computed locally.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from kvflow import checks
from kvflow.checks import counted
from kvflow.connector.consumers import ConsumingRequests
from kvflow.connector.paged_groups import PagedGroup, PagedGroups
from kvflow.connector.parameters import OWN_DIALECT, Dialect
from kvflow.connector.prefix_questions import PrefixQuestions
from kvflow.connector.producers import ProducingRequests
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
    """All requests of an engine's scheduler that load or offer prompts. Until `introduce`, nothing is offered.

    Args:
        config: settings of the scheduler's half.
        new_secret: function that returns a new text at each call, which nobody can guess.
        dialect: form of tickets in the parameters that routers carry.
        questions: decides which peers are asked for which prefixes; None asks no peer.
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
        self._consumers = ConsumingRequests(config, self._groups, dialect)
        self._producers = ProducingRequests(config, self._groups, dialect, new_secret)

    def __repr__(self) -> str:
        consumers = counted(len(self._consumers), "consumer")
        return f"<ConnectorScheduler {consumers}, {counted(len(self._producers), 'producer')}>"

    @property
    def open_requests(self) -> int:
        """Number of requests that load or offer a prompt and have not ended."""
        return len(self._consumers) + len(self._producers)

    def state_of(self, request_id: str) -> ConsumerState | ProducerState | None:
        """Return the state of a request.

        Args:
            request_id: id of the request in the engine.

        Returns:
            The state; None for a request that neither consumes nor produces, or has ended.
        """
        return self._consumers.state_of(request_id) or self._producers.state_of(request_id)

    def blocks_held(self, request_id: str) -> bool:
        """Return whether a request's blocks must stay unchanged, even if the engine has ended the request.

        Args:
            request_id: id of the request in the engine.

        Returns:
            True if they must; False also for an unknown request.
        """
        state = self.state_of(request_id)
        return state is not None and request_blocks_held(state)

    def introduce(self, ticket: Ticket) -> None:
        """Set the ranks from which prompts are offered.

        If the ranks have registered smaller blocks than the engine's, each block of the engine consists of several
        consecutive blocks of the ranks. Block tables in a `Step` then have ids of the ranks' blocks.

        Args:
            ticket: the introductions of all ranks (`ConnectorWorker.introduction`), merged by `merge_tickets`.

        Raises:
            ConfigError: the ranks have another number of groups than the engine, or their blocks do not divide the
                engine's.
        """
        self._groups.set_block_sizes([group.block_size for group in ticket.groups] or [ticket.block_size])
        self._producers.introduce(ticket)

    def forget_ranks(self) -> None:
        """Offer nothing until `introduce` is called again; steps ask the workers for `ConnectorWorker.introduction`.

        Call this when the ranks are about to register their caches again, for example after a sleep: tickets made
        before name the earlier registrations.
        """
        self._producers.introduce(None)

    def add(self, request: EngineRequest, *, sharing: Sharing = Sharing.ALONE) -> None:
        """Add a request that has arrived. A request that neither loads nor offers a prompt changes nothing.

        If the tokens agree with the ticket, but pictures, an adapter or the like do not, nothing is raised: then
        `refusal` returns the error, the request must not be computed, and its load fails.

        Args:
            request: the request.
            sharing: whether other requests have the same ticket.

        Raises:
            RequestError: the parameters are not a ticket, or the ticket was used before (unless samples share it, and
                one sample still needs it); PromptMismatch if the ticket is for other tokens. The prompt is then
                computed locally.
            UsageError: a request with that id was added before and has not ended.
        """
        if self.state_of(request.request_id) is not None:
            raise UsageError(f"request {request.request_id!r}: a request with this id has not ended")
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
        """Count a request that has a ticket but is computed locally for a reason that only the engine knows.

        Requests that `add` refuses are counted by `add`. Once a minute, a log line says how many requests were counted,
        and why.

        Args:
            reason: the text after "because" in that line.
        """
        self._consumers.computed_here[reason] += 1

    def refusal(self, request_id: str) -> PromptMismatch | None:
        """Return the error with which a request must fail, because only the tokens of its prompt agree with its ticket.

        For example, a router may have dropped the prompt's pictures: computed locally, the request would be answered as
        if it had none. The engine either fails the request at once, or gives it blocks: then its load fails with the
        same error.

        Args:
            request_id: id of the request in the engine.

        Returns:
            The error; None for any other request.
        """
        return self._consumers.refusal(request_id)

    def refuse(self, refused: Iterable[tuple[str, PromptMismatch]]) -> None:
        """Note requests that must fail, because their loads found another prompt with the same tokens.

        A pending ticket does not say which prompt it is for, so only the load can compare the prompts.

        Args:
            refused: `Results.refused` of the workers. Afterwards `refusal` returns these errors. Unknown ids change
                nothing.
        """
        self._consumers.refuse(refused)

    def adopt(self, request_id: str, tickets: tuple[Ticket, ...]) -> None:
        """Have a request without a ticket load a prefix that peers offer. The request may offer its own prompt, too.

        Args:
            request_id: id of a request that has no blocks yet.
            tickets: a leased ticket of each peer, all for the same number of tokens; the best first.

        Raises:
            UsageError: the request has a ticket already.
        """
        self._consumers.adopt(request_id, tickets)

    def give_back(self, request_id: str, tickets: tuple[Ticket, ...], *, last: bool = True) -> None:
        """Have the next step release tickets that a request will not read.

        Args:
            request_id: id of the request in the engine.
            tickets: the tickets to give back.
            last: True if no other request reads the blocks: their producers get them back at once.
        """
        self._consumers.give_back(request_id, tickets, last=last)

    def reject(self, request: EngineRequest) -> None:
        """Give back the ticket of a request that was refused before it could be added, or that has ended.

        The producer is notified, unless another request has used the ticket. A request without a ticket changes
        nothing.

        Args:
            request: the request.

        Raises:
            RequestError: its parameters are not a ticket.
        """
        params = checks.mapping(request.kv_transfer_params or {}, "kv_transfer_params")
        if self._config.takes(params):
            self._consumers.reject(request, params)

    def num_new_matched_tokens(self, request_id: str, num_computed_tokens: int) -> Matched:
        """Return how many tokens of a prompt can be loaded, beyond those that the engine's own cache has.

        May be called again and again for a request; peers are asked only once.

        Args:
            request_id: id of the request in the engine.
            num_computed_tokens: tokens that the engine's own cache has; they fill whole blocks.

        Returns:
            The number of tokens beyond `num_computed_tokens`, and whether they are loaded between steps. The number is
            None while the request waits for peers' answers or for another request's load. It is 0 for a request that
            does not consume, and instead of a number below `SchedulingConfig.fetch_tokens_min`.
        """
        if self._questions.ask_or_wait(request_id, num_computed_tokens):
            return None, False
        return self._consumers.match(request_id, num_computed_tokens)

    def update_after_alloc(self, request_id: str, block_ids: GivenTables, num_external_tokens: int) -> None:
        """Note the blocks that a request has been given. The next step loads the missing tokens into these blocks.

        Args:
            request_id: id of the request in the engine.
            block_ids: all blocks of the request in prompt order, computed ones first. With several groups, a table for
                each group. A group with a window has a null block in place of each block that it does not need; a group
                of state has its slot at the end of its table.
            num_external_tokens: the number that `num_new_matched_tokens` returned. If it is 0, nothing will be read,
                and the producer is notified.

        Raises:
            UsageError: the blocks do not fit that number of tokens, or there is another number of tables than of
                groups.
        """
        self._consumers.update_after_alloc(request_id, block_ids, num_external_tokens)
        if num_external_tokens == 0:
            self._questions.resume_waiters(request_id)

    def build_step(self, scheduled: Mapping[str, int], *, preempted: Iterable[str], block_ids: TablesOf) -> Step:
        """Return the workers' work for this step, as decided since the last call.

        Args:
            scheduled: for each request id of the step, the request's total of computed tokens once the step has run.
            preempted: ids of requests that have lost their blocks before the step.
            block_ids: function that returns all blocks of a request that has blocks, in the form of
                `update_after_alloc`.

        Returns:
            The work for `ConnectorWorker.prepare` and `ConnectorWorker.begin` on every rank. The next call does not
            return it again.

        Raises:
            UsageError: `block_ids` returns another number of tables than there are groups.
        """
        self._consumers.computed_here.log()
        step = self._producers.build_step(scheduled, preempted, block_ids)
        self._consumers.add_to_step(step)
        step.questions = self._questions.take_questions()
        return step

    def update_from_workers(
        self,
        *,
        received: Collection[str] = (),
        sent: Iterable[str] = (),
        found: Mapping[str, tuple[Ticket, ...]] = MappingProxyType({}),
    ) -> None:
        """Note what all workers have finished. Ids of requests that do not wait for it change nothing.

        Args:
            received: ids of requests with a load that has ended, successfully or not (`Results.received`).
            sent: ids of requests with a lease that has ended (`Results.sent`).
            found: tickets that peers offer, by request id (`Results.found`). A request that still waits for the answer
                adopts its tickets; else the tickets are given back.
        """
        self._consumers.note_received(received)
        self._producers.note_sent(sent)
        for request_id in received:
            self._questions.resume_waiters(request_id)
        for request_id, tickets in found.items():
            waits = self._questions.note_answer(request_id, found=bool(tickets))
            if tickets:
                (self.adopt if waits else self.give_back)(request_id, tickets)

    def request_finished(self, request_id: str, *, completed: bool, block_ids: GivenTables | None = None) -> Finished:
        """Note that the engine has ended a request, and decide whether its prompt is offered.

        Args:
            request_id: id of the request in the engine.
            completed: True if the request ended normally; False if it was aborted or has failed.
            block_ids: the blocks that the request still has. If given, nothing is offered if the request has lost one
                of the offered blocks. A state that has advanced with the request's answer is not offered either.

        Returns:
            The parameters for the router, and `hold_blocks`: if True, the engine must not reuse the request's blocks
            until the workers report the request as sent or received.

        Raises:
            UsageError: there is another number of tables than of groups.
        """
        self._questions.finish(request_id)
        written = self._consumers.finish(request_id)  # also for a producer: it may load a prefix from a peer
        read = self._producers.finish(request_id, completed=completed, block_ids=block_ids)
        return Finished(written or read.hold_blocks, read.params)

    def withdraw_all(self) -> None:
        """Have the next step end every lease that readers may read.

        Call this when the contents of the blocks must not be read any longer, for example after new weights.
        """
        self._producers.withdraw_all()
