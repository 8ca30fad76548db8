"""Merging: one ticket of those that the ranks of an engine have made for one request."""

from __future__ import annotations

from collections.abc import Sequence

from kvflow import checks
from kvflow.checks import counted, shown
from kvflow.config import RANKS_MAX
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket, changed
from kvflow.errors import RequestError


def merge_tickets(tickets: Sequence[Ticket]) -> Ticket:
    """Merge tickets into one that names the ranks of all: each rank of an engine has made one for the same request.

    Args:
        tickets: at least one, in any order.

    Returns:
        A ticket that saves its readers a question to each rank.

    Raises:
        RequestError: they are not of the same engine, request, blocks and tokens, or name two leases of a rank.
    """
    if (count := checks.count(tickets, "merge_tickets: tickets")) > RANKS_MAX:
        raise RequestError(f"merge_tickets: {counted(count, 'ticket')}, but an engine has at most {RANKS_MAX} ranks")
    given = checks.answer(lambda: tuple(tickets))
    if not given or not all(isinstance(ticket, Ticket) for ticket in given):
        raise RequestError(f"merge_tickets: expected at least one ticket, and tickets only, got {shown(tickets)}")
    first, *others = given
    ranks: dict[tuple[int, int], RankLease] = {}
    for lease in (lease for ticket in given for lease in ticket.ranks):
        known = ranks.setdefault((lease.pp_rank, lease.tp_rank), lease)
        if known != lease:
            raise RequestError(
                f"merge_tickets: two leases of (pp_rank, tp_rank) {(lease.pp_rank, lease.tp_rank)}: seal_index "
                f"{known.seal_index} of {known.incarnation} and {lease.seal_index} of {lease.incarnation}"
            )
    for ticket in others:
        for name in Ticket.__struct_fields__:
            ours, theirs = getattr(first, name), getattr(ticket, name)
            if name not in ("ranks", "ttl_s", "traceparent") and ours != theirs:
                raise RequestError(f"merge_tickets: {name}: {str(ours)[:80]} and {str(theirs)[:80]}")
    return changed(first, ranks=tuple(ranks.values()), ttl_s=min(ticket.ttl_s for ticket in given))
