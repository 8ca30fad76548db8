"""Checks of a ticket whose types are right: names, groups, and blocks that are still to come.

Tickets come through routers, so nothing in them is trusted. Types and bounds of the fields (`core.protocol.ticket`)
refuse most of what no producer would have written; here is the rest. Every refusal is a RequestError that names the
field and its value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvflow import checks
from kvflow.checks import counted, is_name, shown
from kvflow.core.bounds import OFFER_PART_CHARS, TRACEPARENT
from kvflow.core.cache.tensors import NAME_CHARS_MAX
from kvflow.errors import RequestError
from kvflow.hosts import PORT_MAX, is_host, plain_host

if TYPE_CHECKING:
    from kvflow.core.protocol.rank_lease import RankLease
    from kvflow.core.protocol.ticket import Ticket


# Engines have few ranks, and each ticket names one of them again. Types bound the lengths of what is remembered.
@lru_cache(maxsize=1024)
def check_place(host: str, port: int, incarnation: str) -> str:
    """Return the host in its one form (`hosts`). RequestError names what cannot be."""
    if not 0 < port <= PORT_MAX:
        raise RequestError(f"ticket: remote_port {port} is not in 1..{PORT_MAX}")
    plain = plain_host(host)
    if plain is None or not is_host(plain):
        raise RequestError(
            f"ticket: remote_host {host[:80]!a} is no host to connect to: expected a name or number alone"
        )
    if not is_name(incarnation, NAME_CHARS_MAX):
        raise RequestError(f"ticket: incarnation {incarnation[:80]!a} is no name")
    return plain


@lru_cache(maxsize=1024)
def check_engine_id(engine_id: str) -> None:
    if not is_name(engine_id, NAME_CHARS_MAX):
        raise RequestError(f"ticket: remote_engine_id {engine_id[:80]!a} is no name")


def foreign_text(struct: Ticket | RankLease) -> RequestError:
    """Error for a text of a class that is not Python's own: no message can carry it."""
    values = msgspec.structs.asdict(struct).items()
    name, value = next((name, value) for name, value in values if isinstance(value, str) and type(value) is not str)
    return RequestError(f"ticket: {name}: expected a str, got the {type(value).__name__} {shown(value)}")


def too_many(count: int, most: int, what: str = "ticket") -> RequestError:
    return RequestError(f"{what}: {counted(count, 'block id')} in all, at most {most} (limits.block_ids_max)")


_PARTS = ("block ids", "tokens or prompt", "request, ranks or lease")


def check_digests(ticket: Ticket, told: Sequence[str], found: Sequence[str]) -> None:
    """RequestError names the parts of a ticket that are not what a rank has offered, by their digests."""
    for lease, theirs, ours in zip(ticket.ranks, told, found, strict=True):
        if checks.text(theirs, "ticket: digest") and len(theirs) != len(ours):
            raise RequestError(f"ticket: digest: expected {counted(len(ours), 'character')}, got {shown(theirs)}")
        cuts = range(0, len(theirs), OFFER_PART_CHARS)
        both = [(theirs[at : at + OFFER_PART_CHARS], ours[at : at + OFFER_PART_CHARS]) for at in cuts]
        wrong = {name: pair for name, pair in zip(_PARTS, both, strict=False) if pair[0] != pair[1]}
        if wrong:
            digests = "; ".join(f"{name}: digest ours {mine}, theirs {other}" for name, (other, mine) in wrong.items())
            raise RequestError(
                f"ticket: it is not what (pp_rank, tp_rank) {(lease.pp_rank, lease.tp_rank)} of {ticket.engine_id!r} "
                f"has offered of request {ticket.request_id!r}: it was changed on its way, or mixed from several: "
                f"{digests}"
            )


def check_groups(ticket: Ticket) -> None:
    groups = ticket.groups
    if len(groups) != len(ticket.block_tables):
        tables = counted(len(ticket.block_tables), "block table")
        raise RequestError(f"ticket: {counted(len(groups), 'group')}, but {tables}")
    if groups[0].block_size != ticket.block_size:
        raise RequestError(f"ticket: block_size {ticket.block_size}, but {groups[0].block_size} of the first group")
    for group in groups:
        if not group.plausible or not is_name(group.name, NAME_CHARS_MAX):
            what = f"kind {group.kind}, window {group.window}, block_size {group.block_size}"
            raise RequestError(f"ticket: group {group.name[:80]!a}: {what}")


def check_to_come(ticket: Ticket) -> None:
    """RequestError if an offer whose blocks are still to come cannot be right."""
    counts = tuple(map(len, ticket.block_tables))
    if ticket.awaited and (any(counts) or ticket.num_tokens or ticket.extends):
        raise RequestError(
            f"ticket: a rendezvous knows no blocks and tokens, but it has {counts} and {ticket.num_tokens}"
        )
    if any(count > most for count, most in zip(counts, ticket.block_counts, strict=True)):
        why = f"num_tokens {ticket.num_tokens} needs {ticket.block_counts}"
        raise RequestError(f"ticket: blocks by group {counts} of a lease that is extended, but {why}")


def checked_traceparent(value: object, what: str = "traceparent") -> str:
    """RequestError unless it is "" or a W3C traceparent: version, trace id, span id and flags in hexadecimal."""
    traceparent = checks.text(value, what)
    if not re.search(TRACEPARENT, traceparent):
        raise RequestError(f"{what} {traceparent[:80]!a} is no W3C trace context")
    return traceparent


DICT_EXPECTED = "expected a dict of `lease.ticket.to_params()`"
_NAMED = {"engine_id": "remote_engine_id", "request_id": "remote_request_id", "block_ids": "remote_block_ids"}
_NAMED |= {"ranks[0].host": "remote_host", "ranks[0].port": "remote_port", "tp_size": "tp_size"}
_FIELD = re.compile(r"`\$\.(ranks\[0\]\.(?:host|port)|\w+)")


def wrong(given: Mapping[str, Any], error: Exception, *, on_the_way: bool = False) -> RequestError:
    """Error for fields that make no struct; `on_the_way`: named as in a ticket's dict."""
    if isinstance(error, UnicodeEncodeError):
        is_it = partial(operator.is_, error.object)
        where = [name for name, one in given.items() if type(one) in (list, tuple) and any(map(is_it, one))]
        return RequestError(f"ticket: {', '.join(where)}: UTF-8 cannot carry {shown(error.object)}")
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(f"ticket: {shown(error)}")
    said = checks.refusal(error, given)
    if on_the_way:
        said = _FIELD.sub(lambda found: f"`$.{_NAMED.get(found[1]) or f'kvflow.{found[1]}'}", said, count=1)
    return RequestError(f"ticket: {said}" + (f"; {DICT_EXPECTED}" if "required field" in said else ""))
