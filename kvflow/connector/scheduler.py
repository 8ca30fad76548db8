"""The scheduler's half of a connector, for any engine: which prompts are loaded, and the work of each step.

An engine's scheduler calls a `ConnectorScheduler`, which decides without waiting and hands the work to the engine's
workers as a `Step`. For each request, the calls in order are:

    add                      a request has arrived
    num_new_matched_tokens   how many tokens of its prompt can be loaded? may be asked again and again
    update_after_alloc       the request has blocks now
    build_step               the work of the workers in this step
    update_from_workers      what the workers have finished
    request_finished         may its blocks be freed, and what does the router get?

A request consumes (its parameters have a ticket) or produces (they have `do_remote_decode`). A later request with a
used ticket, for example a retry, is computed locally. If a load fails, the engine decides whether the request fails or
is computed locally.
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

__all__ = ["ConnectorScheduler", "EngineRequest", "Finished", "PagedGroup", "SchedulingConfig", "Sharing"]


class ConnectorScheduler:
    """Decides which prompts of an engine's requests are loaded or offered, and what the workers do in each step.

    Until `introduce` is called, nothing is offered.

    Args:
        config: settings of the scheduler's half.
        new_secret: function that returns 16 or more unguessable hexadecimal digits at each call.
        dialect: how to read tickets from `kv_transfer_params`, and how to write them.
        questions: decides which peers are asked for prefixes of which prompts; None: no peer is asked.
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
            request_id: the engine's id of the request.

        Returns:
            The state; None if the request neither loads nor offers its prompt, or has ended.
        """
        return self._consumers.state_of(request_id) or self._producers.state_of(request_id)

    def blocks_held(self, request_id: str) -> bool:
        """Return whether the engine must not reuse or write a request's blocks, even if the request has ended.

        Args:
            request_id: the engine's id of the request.

        Returns:
            True if a load may still write the blocks, or readers may read them. False for an unknown request.
        """
        state = self.state_of(request_id)
        return state is not None and request_blocks_held(state)

    def introduce(self, ticket: Ticket) -> None:
        """Set the ticket that names the engine's ranks, so that prompts can be offered.

        Call this again once the ranks have registered their caches again, for example after a sleep: earlier tickets
        name registrations that have ended. If the ranks have registered smaller blocks than the engine's, block tables
        in a `Step` have ids of the ranks' blocks: several consecutive ids for each block of the engine.

        Args:
            ticket: the ranks' tickets (`ConnectorWorker.introduction`), merged by `merge_tickets`.

        Raises:
            ConfigError: the ranks' number of groups differs from the engine's, or a block size does not divide the
                engine's.
        """
        self._groups.set_block_sizes([group.block_size for group in ticket.groups] or [ticket.block_size])
        self._producers.introduce(ticket)

    def add(self, request: EngineRequest, *, sharing: Sharing = Sharing.ALONE) -> None:
        """Add a request that has arrived. A request that neither loads nor offers a prompt changes nothing.

        If the request's prompt and the ticket's prompt have the same tokens but, for example, different pictures, the
        request must fail. `add` does not raise that error, but `refusal` returns it, and a load fails with it. After a
        RequestError from `add`, the prompt is computed locally.

        Args:
            request: the request.
            sharing: whether other requests may have the same ticket.

        Raises:
            RequestError: the request's parameters are not a ticket, or the ticket was used before. Samples of a prompt
                can share a ticket as long as one of these samples still needs the ticket.
            PromptMismatch: (a RequestError) the ticket is for other tokens.
            WeightsMismatch: (a RequestError) the blocks were computed with other weights (`set_weights`).
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

        `add` counts the requests that it refuses. Once a minute, the counts are logged by reason.

        Args:
            reason: text that follows "because" in the log line.
        """
        self._consumers.computed_here[reason] += 1

    def refusal(self, request_id: str) -> PromptMismatch | None:
        """Return the error with which a request must fail if its prompt and the ticket's differ, but not in tokens.

        For example, a router may have dropped the prompt's pictures: an answer computed here would be wrong. The engine
        can fail the request at once, or give it blocks: then its load fails with the same error.

        Args:
            request_id: the engine's id of the request.

        Returns:
            The error; None for any other request.
        """
        return self._consumers.refusal(request_id)

    def refuse(self, refused: Iterable[tuple[str, PromptMismatch]]) -> None:
        """Record requests that must fail, because their loads found a prompt with the same tokens but other pictures.

        A pending ticket does not say which prompt it is for, so only the load can compare the prompts. Afterwards
        `refusal` returns the errors.

        Args:
            refused: request ids and errors: `Results.refused` of the workers. Unknown ids are ignored.
        """
        self._consumers.refuse(refused)

    def adopt(self, request_id: str, tickets: tuple[Ticket, ...]) -> None:
        """Have a request without a ticket load a prefix that peers offer. The request may also offer its own prompt.

        Args:
            request_id: the engine's id of a request that has no blocks yet.
            tickets: the tickets in peers' answers, all for the same number of tokens, the best peer first.

        Raises:
            UsageError: the request has a ticket already.
        """
        self._consumers.adopt(request_id, tickets)

    def give_back(self, request_id: str, tickets: tuple[Ticket, ...], *, last: bool = True) -> None:
        """Have the next step release tickets, because a request will not read their blocks.

        Args:
            request_id: the engine's id of the request.
            tickets: the tickets to release.
            last: True if no other request needs the tickets. Then their leases end, and the producers can reuse the
                blocks.
        """
        self._consumers.give_back(request_id, tickets, last=last)

    def reject(self, request: EngineRequest) -> None:
        """Release the ticket of a request that was refused before it could be added, or that has ended.

        With the next step, the producer is notified, unless another request has used the ticket. Without a ticket,
        nothing happens.

        Args:
            request: the request.

        Raises:
            RequestError: the request's parameters are not a ticket.
        """
        params = checks.mapping(request.kv_transfer_params or {}, "kv_transfer_params")
        if self._config.takes(params):
            self._consumers.reject(request, params)

    def num_new_matched_tokens(self, request_id: str, num_computed_tokens: int) -> Matched:
        """Return how many tokens of a prompt can be loaded, beyond those that the engine's own cache has.

        This may be called any number of times for a request; peers are asked only once.

        Args:
            request_id: the engine's id of the request.
            num_computed_tokens: number of tokens in the engine's own cache, in whole blocks.

        Returns:
            The number of tokens, and True if the load runs while the engine goes on with other steps. The number is
            None if the request has to wait for peers' answers, for its offer (`SchedulingConfig.late_blocks`) or for
            another request's load. The number is 0 if fewer than `SchedulingConfig.fetch_tokens_min` tokens, or none,
            can be loaded.
        """
        if self._questions.ask_or_wait(request_id, num_computed_tokens):
            return None, False
        return self._consumers.match(request_id, num_computed_tokens)

    def update_after_alloc(self, request_id: str, block_ids: GivenTables, num_external_tokens: int) -> None:
        """Set the blocks of a request. The next step loads the prompt's missing tokens into these blocks.

        Args:
            request_id: the engine's id of the request.
            block_ids: ids of all blocks of the request in prompt order, beginning with computed blocks. With several
                groups, one list for each: a group with a window has null blocks in place of unneeded blocks, a group of
                state has the state's slot at the end.
            num_external_tokens: the number that `num_new_matched_tokens` returned. If it is 0, nothing is loaded, and
                the producer is notified.

        Raises:
            UsageError: the blocks do not fit the number of tokens, or the lists do not fit the groups.
        """
        self._consumers.update_after_alloc(request_id, block_ids, num_external_tokens)
        if num_external_tokens == 0:
            self._questions.resume_waiters(request_id)

    def build_step(
        self,
        scheduled: Mapping[str, int],
        *,
        preempted: Iterable[str],
        block_ids: TablesOf,
        cached: Mapping[str, int] = MappingProxyType({}),
    ) -> Step:
        """Return the workers' work in this engine step: everything that was decided since the last call.

        Args:
            scheduled: for each request in the step, by id, its total of computed tokens after the step.
            preempted: ids of requests that have lost their blocks before the step.
            block_ids: function that takes a request id and returns the ids of all its blocks, as in
                `update_after_alloc`.
            cached: for requests that begin in this step, by id, the tokens that the engine's cache has already. Readers
                that wait for the prompt then read these while the step computes the others.

        Returns:
            The argument for `ConnectorWorker.prepare` and `ConnectorWorker.begin` on every rank.

        Raises:
            UsageError: `block_ids` does not return one list for each group.
        """
        self._consumers.computed_here.log()
        step = self._producers.build_step(scheduled, preempted, block_ids, cached)
        self._consumers.add_to_step(step)
        step.questions = self._questions.take_questions()
        return step

    def update_from_workers(
        self,
        *,
        received: Collection[str] = (),
        sent: Iterable[str] = (),
        found: Mapping[str, tuple[Ticket, ...]] = MappingProxyType({}),
        offered: Iterable[str] = (),
    ) -> None:
        """Record the results of the workers. Ids of requests that await no result are ignored.

        Args:
            received: ids of requests with loads that have ended on all workers, well or not (`Results.received`).
            sent: ids of requests with leases that have ended on all workers (`Results.sent`).
            found: tickets in peers' answers, by request id (`Results.found`). A request that still waits for them loads
                with them (`adopt`); otherwise they are released.
            offered: ids of requests with prompts that are offered now on one worker, or never will be
                (`Results.offered`). With `SchedulingConfig.late_blocks` they wait for that.
        """
        self._consumers.note_received(received)
        self._consumers.note_offered(offered)
        self._producers.note_sent(sent)
        for request_id in received:
            self._questions.resume_waiters(request_id)
        for request_id, tickets in found.items():
            waits = self._questions.note_answer(request_id, found=bool(tickets))
            if tickets:
                (self.adopt if waits else self.give_back)(request_id, tickets)

    def request_finished(self, request_id: str, *, completed: bool, block_ids: GivenTables | None = None) -> Finished:
        """Record that the engine has ended a request, and decide whether the request's prompt is offered.

        Args:
            request_id: the engine's id of the request.
            completed: True if the request ended normally; False if it was aborted or has failed.
            block_ids: ids of the blocks that the request still has. If given, the prompt is offered only if these
                blocks include all blocks of the prompt. A prompt is never offered once a recurrent state has advanced
                beyond the prompt.

        Returns:
            The parameters for the router, and `hold_blocks`: if True, the engine must not reuse the request's blocks
            until the workers report the request as sent or received.

        Raises:
            UsageError: `block_ids` does not have one list for each group.
        """
        self._questions.finish(request_id)
        written = self._consumers.finish(request_id)  # also for a producer: it may load a prefix from a peer
        read = self._producers.finish(request_id, completed=completed, block_ids=block_ids)
        return Finished(written or read.hold_blocks, read.params)

    def withdraw_all(self) -> None:
        """Have the next step end each lease that readers know and may be reading.

        Call this when the blocks must not be read any longer, for example after new weights.
        """
        self._producers.withdraw_all()

    def set_weights(self, version: str) -> None:
        """Announce that the engine has other weights than before. Tell the workers first (`ConnectorWorker`).

        Requests that come with a ticket of other weights are computed here. Prompts of present requests are not
        offered, since part of them may have been computed with the old weights.

        Args:
            version: name of the weights, as for `kvflow.Runtime.set_weights`.
        """
        self._consumers.weights = version
        self._producers.set_weights(version)
