"""Loads whose ticket is a rendezvous wait for their offer here. From then on they are as any other load.

An offer is compared with the room that was made for it once it is known: when a load is accepted, or after it was met.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvflow.checks import count, counted
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.protocol.prompts import check_prompt
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import COMPUTE, PromptMismatch, RequestError
from kvflow.growing.room import check_place, check_room
from kvflow.runtime.load.leases import RemoteLeases
from kvflow.runtime.load.load import Carry, Load, Work
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.peers.peer import LocalRank, Meet, Source


class Meeting:
    """Carries loads that have to wait for their offers, and hands them over to the carrier of all others."""

    def __init__(self, local: LocalRank, meet: Meet, remote_leases: RemoteLeases, carry: Carry) -> None:
        self._local = local
        self.groups = local.groups
        self._meet = meet
        self._remote_leases = remote_leases
        self._carry = carry

    async def carry(self, load: Load, work: Work) -> LoadReport:
        """Wait until its offer is known, then hand over."""
        work.enter("handshake")

        def found(source: Source, ttl_s: float) -> None:
            self._remote_leases.keep(load, ttl_s, source)

        work.ticket = await self._meet(work.ticket, found, partial(work.compute, lambda: "its lease is not opened yet"))
        if work.phase == COMPUTE:
            work.enter("handshake")
        check_met(self.groups, load.request, work.ticket, work.tables)
        return await self._carry(load, work)

    def then(self, carry: Carry) -> Carry:
        """A meeting that hands over to another carrier."""
        return Meeting(self._local, self._meet, self._remote_leases, carry).carry


def check_expected(
    groups: Sequence[GroupFacts], request: LoadRequest, ticket: Ticket, tables: Sequence[BlockIds]
) -> None:
    """Compare a request with its offer, as far as that is known.

    PromptMismatch if the offer is of another prompt or number of tokens; RequestError if the local blocks are not for
    just the offered tokens, or go beyond the prompt.
    """
    what = f"request {request.request_id!r}"
    if not ticket.awaited:
        _check_offer(ticket, request)
        check_offered(groups, request, ticket, tables)
    elif request.prompt is not None:
        tokens = count(request.prompt, f"{what}: prompt")
        check_room(groups, tables, request.cached_tokens, tokens, what, f"the {counted(tokens, 'token')} of its prompt")


def check_met(groups: Sequence[GroupFacts], request: LoadRequest, ticket: Ticket, tables: Sequence[BlockIds]) -> None:
    """Compare a request with an offer that was waited for: as `check_expected`.

    PromptMismatch if the local blocks were made for the prompt, and the offer ends before them or beyond.
    """
    if request.prompt is not None or request.num_tokens is not None:
        _check_offer(ticket, request)
        check_offered(groups, request, ticket, tables, RequestError if request.prompt is None else PromptMismatch)


def check_offered(
    groups: Sequence[GroupFacts],
    request: LoadRequest,
    ticket: Ticket,
    tables: Sequence[BlockIds],
    kind: type[RequestError] = RequestError,
) -> None:
    """Raise `kind` unless the local blocks are for just the tokens that a known offer has; see `growing.room`."""
    if not ticket.has_blocks:
        return  # nothing is read
    told = request.num_tokens
    if told is None and request.prompt is not None:
        told = len(request.prompt)
    check_place(
        groups,
        tables,
        request.cached_tokens,
        ticket.offered_tokens,
        told=told,
        what=f"request {request.request_id!r}",
        whose=_whose(ticket),
        kind=kind,
    )


def _check_offer(ticket: Ticket, request: LoadRequest) -> None:
    """PromptMismatch if a ticket is not of the prompt that its reader has made room for, as far as both say."""
    what, offers = f"request {request.request_id!r}", f"{_whose(ticket)} offers {ticket.offered_tokens}"
    if request.prompt is not None:
        check_prompt(ticket, request.prompt, what)
        if len(request.prompt) < ticket.offered_tokens:
            raise PromptMismatch(f"{what}: its prompt has {counted(len(request.prompt), 'token')}, {offers}")
    if request.num_tokens is not None and request.num_tokens != ticket.offered_tokens:
        raise PromptMismatch(f"{what}: expected {counted(request.num_tokens, 'token')}, {offers}")


def _whose(ticket: Ticket) -> str:
    return f"{ticket.engine_id!r} at {ticket.address}"
