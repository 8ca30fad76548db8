"""Parameters that routers carry from engine to engine (`kv_transfer_params`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.protocol.spare import with_spare
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError
from kvflow.limits import REQUEST_ID_CHARS_MAX

__all__ = ["OWN_DIALECT", "Dialect", "params_of_several", "producer_params"]

_RENDEZVOUS, _AWAITED, _OTHERS = "rendezvous", "awaited", "others"
_OTHERS_MAX = 15
_NAME_CHARS_MAX = 200


def name_of(request_id: str) -> str:
    """A runtime's name for an engine's request: its id, or the beginning and a digest of an id that is too long."""
    if len(request_id) <= _NAME_CHARS_MAX:
        return request_id
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, usedforsecurity=False).hexdigest()
    return f"{request_id[:_NAME_CHARS_MAX]}~{digest}"


def producer_params(rendezvous: Ticket) -> dict[str, Any]:
    """The parameters of the request that is to be computed for a rendezvous; its reader's are `rendezvous.to_params()`.

    Args:
        rendezvous: a ticket by `Ticket.rendezvous`.

    Returns:
        `kv_transfer_params` in JSON types.

    Raises:
        RequestError: the ticket is of another kind.
    """
    ticket = checks.instance(rendezvous, Ticket, "producer_params")
    if not ticket.awaited:
        raise RequestError("producer_params: expected a ticket by Ticket.rendezvous, got one of blocks that are there")
    named = {_RENDEZVOUS: ticket.request_id, _AWAITED: ticket.to_params()}
    return {"do_remote_decode": True, "do_remote_prefill": False, "kvflow": named}


def rendezvous_in(params: Mapping[str, Any]) -> str | None:
    """The name under which a prompt that is to flow is offered; None of any other. RequestError if it cannot be one."""
    given = _own(params, _RENDEZVOUS)
    return None if given is None else checks.request_id(given, REQUEST_ID_CHARS_MAX)


def awaited_in(params: Mapping[str, Any]) -> Ticket | None:
    """The rendezvous by which the readers of a prompt that is to flow wait; None if the router has not told.

    RequestError if it is not one of that prompt.
    """
    given = _own(params, _AWAITED)
    if given is None:
        return None
    ticket = Ticket.from_params(checks.mapping(given, f"ticket: {_AWAITED}"))
    if not ticket.awaited or ticket.request_id != rendezvous_in(params):
        raise RequestError(f"ticket: {_AWAITED}: expected a rendezvous of the name that is given beside it")
    return ticket


def params_of_several(params: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make the parameters of a request whose prompt several engines have computed, or are to.

    The load reads from the first, and from the next one if that fails or has ended.

    Args:
        params: what each engine has answered, or `Ticket.to_params()`, the best first.

    Returns:
        Parameters for the decode engine's request.

    Raises:
        RequestError: there is none, there are too many, or one is no dict of a ticket.
    """
    if not 0 < len(params) <= 1 + _OTHERS_MAX:
        raise RequestError(f"params_of_several: {counted(len(params), 'ticket')}, expected 1 to {1 + _OTHERS_MAX}")
    first, *others = (dict(checks.mapping(one, "params_of_several")) for one in params)
    extra = dict(checks.mapping(first.get("kvflow"), "params_of_several: kvflow"))
    return {**first, "kvflow": {**extra, _OTHERS: others}}


def others_in(params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The parameters of further tickets of the same prompt. RequestError if they cannot be."""
    given = _own(params, _OTHERS)
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or len(given) > _OTHERS_MAX:
        raise RequestError(f"ticket: others: expected at most {_OTHERS_MAX} dicts, got {checks.shown(given)}")
    return [checks.mapping(one, "ticket: others") for one in given]


def _own(params: Mapping[str, Any], name: str) -> Any:
    """Return what the field `kvflow` has under a name; None if there is neither."""
    extra = params.get("kvflow")
    return extra.get(name) if isinstance(extra, Mapping) else None


def _own_params(ticket: Ticket) -> dict[str, Any]:
    return with_spare(ticket.to_params())


class Dialect(NamedTuple):
    """The form of tickets in the parameters that routers carry; by default as engines of our own make do."""

    read_ticket: Callable[[Mapping[str, Any]], Ticket] = Ticket.from_params
    """RequestError for what is none."""
    params_of: Callable[[Ticket], dict[str, Any]] = _own_params
    shown_id: Callable[[str], str] = str
    """A request's id as it may stand in the name that its lease is found by."""


OWN_DIALECT = Dialect()
"""Tickets as engines of our own make write them."""
