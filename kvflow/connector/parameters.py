"""Reads and writes `kv_transfer_params`: the dicts in which routers carry tickets from engine to engine."""

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

_PENDING_ID, _PENDING_TICKET, _OTHERS = "rendezvous", "awaited", "others"
_OTHERS_MAX = 15
_NAME_CHARS_MAX = 200


def runtime_id_of(request_id: str) -> str:
    """Return the runtime's request id for an engine's `request_id`; a long id becomes its beginning and a digest."""
    if len(request_id) <= _NAME_CHARS_MAX:
        return request_id
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, usedforsecurity=False).hexdigest()
    return f"{request_id[:_NAME_CHARS_MAX]}~{digest}"


def producer_params(rendezvous: Ticket) -> dict[str, Any]:
    """Return the `kv_transfer_params` for the prefill request that will compute the prompt of a pending ticket.

    The decode request, which reads that prompt, gets `rendezvous.to_params()`.

    Args:
        rendezvous: a pending ticket, made by `Ticket.rendezvous`.

    Returns:
        `kv_transfer_params` in JSON types.

    Raises:
        RequestError: the ticket is not a pending ticket.
    """
    ticket = checks.instance(rendezvous, Ticket, "producer_params")
    if not ticket.awaited:
        raise RequestError("producer_params: expected a pending ticket (Ticket.rendezvous), got the ticket of a lease")
    named = {_PENDING_ID: ticket.request_id, _PENDING_TICKET: ticket.to_params()}
    return {"do_remote_decode": True, "do_remote_prefill": False, "kvflow": named}


def pending_id_in(params: Mapping[str, Any]) -> str | None:
    """Return the request id of the pending ticket in `params`, a prefill request's `kv_transfer_params`, or None.

    RequestError if the id is invalid.
    """
    request_id = _kvflow_value(params, _PENDING_ID)
    return None if request_id is None else checks.request_id(request_id, REQUEST_ID_CHARS_MAX)


def pending_ticket_in(params: Mapping[str, Any]) -> Ticket | None:
    """Return the pending ticket in `params`, a prefill request's `kv_transfer_params`, or None.

    RequestError if the ticket is not pending, or if `pending_id_in` returns another request id than the ticket has.
    """
    pending_params = _kvflow_value(params, _PENDING_TICKET)
    if pending_params is None:
        return None
    ticket = Ticket.from_params(checks.mapping(pending_params, f"ticket: {_PENDING_TICKET}"))
    request_id = pending_id_in(params)
    if not ticket.awaited or ticket.request_id != request_id:
        got = f"{'a pending' if ticket.awaited else 'another'} ticket of request {ticket.request_id!r}"
        expected = f"expected a pending ticket of request {request_id!r}"
        raise RequestError(f"ticket: {_PENDING_TICKET}: {expected}, got {got}")
    return ticket


def params_of_several(params: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `kv_transfer_params` for a load of one prompt that several engines have computed, or will compute.

    The load reads from the first engine. If that fails, or if the first engine's lease has ended, it reads from the
    next.

    Args:
        params: for each engine, in the order to try: the `kv_transfer_params` in the engine's answer, or
            `Ticket.to_params()`.

    Returns:
        Parameters for the decode engine's request.

    Raises:
        RequestError: `params` is empty, has more than 16 items, or has an item that is no dict.
    """
    if not 0 < len(params) <= 1 + _OTHERS_MAX:
        raise RequestError(f"params_of_several: {counted(len(params), 'ticket')}, expected 1 to {1 + _OTHERS_MAX}")
    first, *others = (dict(checks.mapping(of_engine, "params_of_several")) for of_engine in params)
    extra = dict(checks.mapping(first.get("kvflow"), "params_of_several: kvflow"))
    return {**first, "kvflow": {**extra, _OTHERS: others}}


def other_params_in(params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the `kv_transfer_params` of the second and later engines in `params`, a result of `params_of_several`.

    Empty if `params` are for one engine. RequestError if their entry for further engines is not a list of dicts.
    """
    others = _kvflow_value(params, _OTHERS)
    if others is None:
        return ()
    if not isinstance(others, list | tuple) or len(others) > _OTHERS_MAX:
        raise RequestError(f"ticket: others: expected at most {_OTHERS_MAX} dicts, got {checks.short_repr(others)}")
    return [checks.mapping(of_engine, "ticket: others") for of_engine in others]


def _kvflow_value(params: Mapping[str, Any], name: str) -> Any:
    """Return `params["kvflow"][name]`, or None if either key is missing."""
    extra = params.get("kvflow")
    return extra.get(name) if isinstance(extra, Mapping) else None


def _own_params(ticket: Ticket) -> dict[str, Any]:
    return with_spare(ticket.to_params())


class Dialect(NamedTuple):
    """How to read tickets from `kv_transfer_params`, and how to write them. The defaults are for kvflow's engines."""

    read_ticket: Callable[[Mapping[str, Any]], Ticket] = Ticket.from_params
    """Function that returns the ticket in `kv_transfer_params`, or raises RequestError."""
    params_of: Callable[[Ticket], dict[str, Any]] = _own_params
    shown_id: Callable[[str], str] = str
    """Function that takes a request id and returns the text with which the name of the request's lease begins."""


OWN_DIALECT = Dialect()
"""Dialect of kvflow's own engines."""
