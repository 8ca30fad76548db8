"""Compares a request with its offer: when the load is accepted, or once an offer that was waited for is known."""

from __future__ import annotations

from collections.abc import Sequence

from kvflow.checks import count, counted
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.plan.room import check_place, check_room
from kvflow.core.protocol.prompts import check_prompt
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import PromptMismatch, RequestError
from kvflow.runtime.load.requests import LoadRequest


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
    """Raise `kind` unless the local blocks are for just the tokens that a known offer has; see `plan.room`."""
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
