"""Requests that compute their prompts for readers, and the leases of those prompts.

The step that completes a prompt opens its lease, under a name that stays secret until the request ends and the router
gets the ticket. Until then a preemption or an abort may take the blocks at once, since no reader can know the lease.
Afterwards the blocks are held until the workers report the end of the lease.

If readers wait for the prompt with a pending ticket (`Ticket.rendezvous`), the prompt *flows*: its lease is opened in
the prompt's first step, grows with every step, and may be read at any time. A preemption recalls the lease: the workers
end the lease before the next step writes, which takes a moment (`Step.recall`). If the request is aborted, its blocks
are held until the lease has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvflow.checks import counted
from kvflow.connector.paged_groups import PagedGroups
from kvflow.connector.parameters import Dialect, pending_id_in, pending_ticket_in, runtime_id_of
from kvflow.connector.request_states import PRODUCER_TABLE, ProducerEvent, ProducerState, request_blocks_held
from kvflow.connector.scheduling_config import SchedulingConfig
from kvflow.connector.step import Decline, EngineRequest, Finished, GivenTables, Grow, Save, Step, TablesOf
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.policy.states import allows, fire
from kvflow.core.protocol.prompts import marks_of, prompt_digest
from kvflow.core.protocol.ticket import Ticket, with_weights
from kvflow.logs import logger_of
from kvflow.secret_ids import with_secret

logger = logger_of(__name__)

_WARNED_ENGINES_MAX = 1 << 8


@dataclass(slots=True, kw_only=True)
class _Producer:
    request_id: str
    num_prompt_tokens: int
    """Number of prompt tokens that may be offered: all, or with `withhold_last_token` all but the last."""
    prompt: Sequence[int] | None
    serve_id: str | None = None
    """Request id of the readers' pending ticket, which becomes the name of the lease. None if no readers wait, or if
    that lease was recalled or declined."""
    saved: Save | None = None
    """The `Save` that opened the prompt's lease, with all blocks and tokens added since. None if no lease is open."""
    num_computed_tokens: int = 0
    state: ProducerState = ProducerState.COMPUTING

    @property
    def complete(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens


class ProducingRequests:
    """All requests of an engine that offer their prompts, and the workers' next work for them."""

    def __init__(
        self, config: SchedulingConfig, groups: PagedGroups, dialect: Dialect, new_secret: Callable[[], str]
    ) -> None:
        self._config = config
        self._groups = groups
        self._dialect = dialect
        self._new_secret = new_secret
        self._introduction: Ticket | None = None
        """Ticket without blocks that names all ranks of this engine, and from which all offers' tickets are made. While
        None, nothing is offered."""
        self._weights = ""
        """Version of the engine's weights (`set_weights`)."""
        self._requests: dict[str, _Producer] = {}
        self._warned_engines = BoundedMap[tuple[str, str], None](_WARNED_ENGINES_MAX)
        """Other engines (engine id and address) at which readers have waited for a prompt that is computed here. One
        warning was logged for each."""
        self._next_step = Step()

    def __len__(self) -> int:
        return len(self._requests)

    def state_of(self, request_id: str) -> ProducerState | None:
        """Return the state of a request, or None if the request has ended or does not offer its prompt."""
        request = self._requests.get(request_id)
        return None if request is None else request.state

    def introduce(self, ticket: Ticket) -> None:
        """Set the ticket that names the ranks of this engine, so that prompts can be offered."""
        self._introduction = ticket

    def add(self, request: EngineRequest, params: Mapping[str, Any]) -> None:
        """Add a request that offers its prompt. `params` may have the pending ticket of readers that already wait.

        If the readers wait at another engine or DP rank, redirect them to this engine.
        """
        pending = pending_ticket_in(params)
        self._requests[request.request_id] = _Producer(
            request_id=request.request_id,
            num_prompt_tokens=max(request.num_prompt_tokens - self._config.withhold_last_token, 0),
            prompt=request.prompt_token_ids,
            serve_id=pending_id_in(params),
        )
        if pending is not None and self._introduction is not None:
            self._redirect_readers(request.request_id, pending, self._introduction)

    def _redirect_readers(self, request_id: str, pending: Ticket, ours: Ticket) -> None:
        """If readers with the pending ticket `pending` wait at another engine or DP rank, redirect them to this engine.

        `ours` is a ticket without blocks that names this engine's ranks.
        """
        places = ({rank.address for rank in side.ranks} for side in (pending, ours))
        if (pending.engine_id, pending.dp_rank) == (ours.engine_id, ours.dp_rank) and set.intersection(*places):
            return
        here, there = (f"{side.engine_id!r} (dp_rank {side.dp_rank}) at {side.address}" for side in (ours, pending))
        reason = f"its prompt was sent to {here}, not to {there}"
        if (pending.engine_id, pending.address) not in self._warned_engines:
            self._warned_engines[pending.engine_id, pending.address] = None
            logger.warning(
                "request %s: %s, where its readers wait: they are redirected, which costs one more question. Have the "
                "router send prompts to the engine and DP rank that the pending ticket names (logged once per engine)",
                request_id,
                reason,
            )
        instead = Ticket.rendezvous(ours, pending.request_id, ttl_s=pending.ttl_s)
        self._next_step.decline.append(
            Decline(serve_id=pending.request_id, reason=reason, waiting_at=pending, instead=instead)
        )

    def build_step(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        block_ids: TablesOf,
        cached: Mapping[str, int],
    ) -> Step:
        """Return the workers' work in this engine step for prompts that are offered to readers.

        `scheduled` has each request's total of computed tokens after the step, `cached` the total before it, if known.
        `preempted` are the ids of requests that have lost their blocks. `block_ids` returns a request's blocks.
        """
        for request_id in preempted:
            self._preempt(request_id)
        for request_id, computed in scheduled.items():
            request = self._requests.get(request_id)
            if request is not None:
                late = request.complete and request.num_prompt_tokens > 0
                request.num_computed_tokens = computed
                self._open_or_extend(request, block_ids, late=late, cached=cached.get(request_id, 0))
        self._recall_prompts_with_lost_blocks(block_ids)
        step, self._next_step = self._next_step, Step()
        return step

    def note_sent(self, request_ids: Iterable[str]) -> None:
        """Record that the leases of these requests have ended. Ignore requests in states other than SENDING and SAVED.

        In SAVED no router has the ticket yet, and now gets none, so that the prompt is computed elsewhere at once.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and allows(PRODUCER_TABLE, request.state, "sent"):
                self._fire(request, "sent")
            elif request is not None and request.state is ProducerState.SAVED:
                self._give_up(request, flows=False)

    def finish(self, request_id: str, *, completed: bool, block_ids: GivenTables | None) -> Finished:
        """Record that the engine has ended a request, and offer its prompt if its blocks still hold the whole prompt.

        Return the parameters for the router and whether the engine must hold the blocks. `completed`: the request was
        neither aborted nor failed. `block_ids`: the blocks that the request still has, if known.
        """
        request = self._requests.get(request_id)
        if request is None:
            return Finished(False, None)
        save, known, flows = request.saved, request.prompt, request.state is ProducerState.FLOWING
        whole = completed and self._still_holds_prompt(request, block_ids) and (request.complete or not flows)
        if save is None or self._introduction is None or not whole:
            self._give_up(request, flows=flows)
            return Finished(request_blocks_held(request.state), None)
        ticket = self._introduction.without_leases(
            request_id=save.serve_id,
            block_ids=given_block_ids(save.block_tables),
            num_tokens=save.num_tokens,
            ttl_s=self._config.lease_ttl_s,
            prompt_digest="" if known is None else prompt_digest(save.serve_id, known[: save.num_tokens]),
        )
        if self._weights:
            ticket = with_weights(ticket, self._weights)
        if any(save.block_tables):
            self._send(request)
        else:
            self._fire(request, "end")  # nothing to read, so nothing to wait for
        return Finished(request_blocks_held(request.state), self._dialect.params_of(ticket))

    def withdraw_all(self) -> None:
        """Have the next step end each lease that readers know and may be reading."""
        for request in self._requests.values():
            if request.state is ProducerState.FLOWING:
                self._recall(request)
        self._next_step.withdraw += (
            request.request_id for request in self._requests.values() if request.state is ProducerState.SENDING
        )

    def set_weights(self, version: str) -> None:
        """Record the version of the engine's new weights. Offer no prompt of which a token may be of the old ones."""
        self._weights = version
        for request in list(self._requests.values()):
            if request.state is ProducerState.FLOWING:
                self._recall(request)
            if request.state is not ProducerState.SENDING:  # the workers have ended the leases of those
                self._give_up(request, flows=False)

    def _send(self, request: _Producer) -> None:
        self._fire(request, "send")
        self._next_step.send.append(request.request_id)

    def _give_up(self, request: _Producer, *, flows: bool) -> None:
        """End a request; the router gets no ticket.

        `flows`: readers may be reading the prompt while it is computed. If so, notify these readers, end the lease, and
        hold the blocks until no read can succeed. Otherwise the blocks are free at once.
        """
        if flows:
            self._send(request)
            self._next_step.withdraw.append(request.request_id)
        else:
            self._fire(request, "end")
            self._withdraw(request)
            self._decline(request, "the request has ended before its prompt was computed")

    def _decline(self, request: _Producer, reason: str) -> None:
        """If readers wait for the prompt of `request`, have the next step notify them that the prompt will not come.

        The readers' error message contains the `reason`.
        """
        serve_id, request.serve_id = request.serve_id, None
        if serve_id is not None:
            self._next_step.decline.append(Decline(serve_id=serve_id, reason=reason))

    def _withdraw(self, request: _Producer) -> None:
        """If `request` has an open lease, which no reader knows yet, have the next step end that lease."""
        save, request.saved = request.saved, None
        if save is not None and any(save.block_tables):
            self._next_step.withdraw.append(request.request_id)

    def _recall(self, request: _Producer) -> None:
        """Have the next step end a growing lease.

        Loads that read the lease's blocks fail, even if the prompt is computed again.
        """
        self._fire(request, "preempt")
        self._next_step.recall.append(request.request_id)
        request.saved = request.serve_id = None

    def _preempt(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.num_computed_tokens = 0
        if request.state is ProducerState.SAVED:
            self._fire(request, "preempt")
            self._withdraw(request)
        elif request.state is ProducerState.FLOWING:
            self._recall(request)
        elif request_id in self._next_step.withdraw:
            self._next_step.recall.append(request_id)  # the request was preempted first, and then ended

    def _still_holds_prompt(self, request: _Producer, block_ids: GivenTables | None) -> bool:
        """Return True if `request` has an open lease, and the lease's blocks still hold the whole prompt.

        `block_ids` are the request's present blocks: if given, they must be those of the lease. A recurrent state must
        not have advanced beyond the prompt.
        """
        save = request.saved
        if save is None or (self._config.has_state and request.num_computed_tokens > save.num_tokens):
            return False
        return block_ids is None or self._groups.prompt_blocks(block_ids, save.num_tokens) == save.block_tables

    def _recall_prompts_with_lost_blocks(self, block_ids: TablesOf) -> None:
        """Recall each growing lease that has lost blocks of its prompt, even if its request is not in this step.

        Blocks are lost when a window or recurrent state advances beyond the prompt while the answer is computed.
        """
        if self._groups.blocks_stay:
            return
        for request in self._requests.values():
            flows = request.state is ProducerState.FLOWING
            if flows and request.complete and not self._still_holds_prompt(request, block_ids(request.request_id)):
                self._recall(request)

    def _open_or_extend(self, request: _Producer, block_ids: TablesOf, *, late: bool, cached: int) -> None:
        """Have the next step open or extend a request's lease, because this step computes more of the request's tokens.

        `late`: the prompt was complete before this step. Then, in a cache with windows or recurrent state, no lease is
        opened, since windows and state may have advanced beyond the prompt. `cached`: tokens computed before this step.
        """
        computing = request.state is ProducerState.COMPUTING
        if self._introduction is None or not (computing or request.state is ProducerState.FLOWING):
            return
        if computing and late and not self._groups.blocks_stay:
            return
        if request.saved is not None:
            self._grow(request, request.saved, block_ids(request.request_id))
        elif request.serve_id is not None and not self._config.offered_of(request.num_prompt_tokens):
            prompt = counted(request.num_prompt_tokens, "token")
            self._decline(request, f"a prompt of {prompt} has no full block, and only full blocks are offered")
        elif request.serve_id is not None or request.complete:
            self._offer(request, block_ids(request.request_id), request.serve_id, cached)

    def _offer(self, request: _Producer, block_ids: GivenTables, name: str | None, cached: int) -> None:
        """Have the next step open the lease of a request's prompt.

        `name` is the name under which readers wait for the lease, which they may read while the prompt is computed. If
        None, no reader waits, and the lease gets a secret name. If readers wait and the cache has the prompt's first
        `cached` tokens, the lease opens before the step, so that these are read while the step computes the others.
        """
        tokens, flows = self._config.offered_of(request.num_prompt_tokens), name is not None
        # A window that moves in this step may take blocks from what is offered before it.
        early = min(cached, tokens) if flows and self._groups.blocks_stay else 0
        computed = early or min(request.num_computed_tokens, tokens)
        prompt = request.prompt[:tokens] if flows and request.prompt is not None else None
        save = request.saved = Save(
            request_id=request.request_id,
            serve_id=name or with_secret(self._dialect.shown_id(runtime_id_of(request.request_id)), self._new_secret()),
            block_tables=self._groups.prompt_blocks(block_ids, tokens, complete=computed == tokens),
            num_tokens=tokens,
            ttl_s=self._config.lease_ttl_s,
            computed_tokens=computed if flows else None,
            prompt=None if prompt is None else tuple(prompt),
            marks=marks_of(prompt),
        )
        self._fire(request, "flow" if flows else "save")
        if early:
            self._next_step.save_cached.append(save)
            self._grow(request, save, block_ids)
        elif flows or any(save.block_tables):
            self._next_step.save.append(save)

    def _grow(self, request: _Producer, save: Save, block_ids: GivenTables) -> None:
        """Have the next step add the tokens that this step computes, if any, to a growing lease.

        `save` describes the lease so far.
        """
        computed = min(request.num_computed_tokens, save.num_tokens)
        tables = self._groups.prompt_blocks(block_ids, save.num_tokens, complete=computed == save.num_tokens)
        if computed == save.computed_tokens:
            return
        more = tuple(now[len(before) :] for before, now in zip(save.block_tables, tables, strict=True))
        request.saved = msgspec.structs.replace(save, block_tables=tables, computed_tokens=computed)
        self._next_step.grow.append(Grow(request_id=request.request_id, block_tables=more, num_tokens=computed))

    def _fire(self, request: _Producer, event: ProducerEvent) -> None:
        request.state = fire(PRODUCER_TABLE, request.state, event)
        if request.state is ProducerState.ENDED:
            del self._requests[request.request_id]
