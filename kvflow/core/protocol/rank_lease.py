"""The lease of one rank, as tickets and answers of ranks carry it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from kvflow.checks import INT64_MAX, INT64_MIN, shown
from kvflow.core.bounds import ENTRIES_MAX, Count, TicketLeaseId
from kvflow.core.cache.groups import GROUPS_MAX
from kvflow.core.cache.tensors import NAME_CHARS_MAX
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.ticket_checks import check_place, foreign_text, wrong
from kvflow.errors import RequestError
from kvflow.hosts import HOST_CHARS_MAX, address_at

_TEXTS = operator.attrgetter("host", "incarnation", "lease_id")

Int64: TypeAlias = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
"""Python and JSON know larger integers, but no message of ours can carry them."""
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Host: TypeAlias = Annotated[str, Meta(max_length=HOST_CHARS_MAX)]
BlockIds: TypeAlias = Annotated[tuple[Int64, ...], Meta(max_length=ENTRIES_MAX)]
BlockTables: TypeAlias = Annotated[tuple[BlockIds, ...], Meta(max_length=GROUPS_MAX)]


class Checked(msgspec.StructMeta):
    """Structs whose constructor checks the types and bounds of the fields, as decoding does: none exists unchecked."""

    def __call__(self, **given: Any) -> Any:
        if unknown := given.keys() - {*self.__struct_fields__}:
            raise TypeError(f"{self.__name__} has no fields {sorted(unknown)}")
        more = given.get("more_block_ids")
        for ids in (given.get("block_ids"), more, *(more if isinstance(more, tuple | list) else ())):
            if isinstance(ids, set | frozenset):  # msgspec would take one, but its order is nobody's
                raise RequestError(f"ticket: block_ids, more_block_ids: expected tuples, got {shown(ids)}")
        return _convert(given, self)


class RankLease(msgspec.Struct, metaclass=Checked, frozen=True, kw_only=True, omit_defaults=True):
    """The lease of one rank, and where its side channel listens.

    `block_ids` are set if the rank's differ from the engine's: it offers host buffers. In a ticket's dict the first
    rank has no host and port: they are where routers look for them. With an empty `lease_id` the rank has to be asked.
    """

    pp_rank: Count
    tp_rank: Count
    lease_id: TicketLeaseId
    seal_index: Count
    incarnation: Name
    host: Host = ""
    port: Int64 = 0
    block_ids: BlockIds | None = None
    more_block_ids: BlockTables = ()
    """Block ids of the further groups, as in a ticket."""
    pending: bool = False
    """True if blocks were still being computed: the seal has to be seen before anything is read."""
    payload: bool = False
    """True if a payload comes with the lease's end."""
    held: bool = True
    """True if blocks are held for a moment after the lease's end; else the seal is looked at after the last byte."""

    def __post_init__(self) -> None:
        if {*map(type, _TEXTS(self))} != {str}:
            raise foreign_text(self)
        host = check_place(self.host, self.port, self.incarnation)
        if host != self.host:  # hosts have one form
            msgspec.structs.force_setattr(self, "host", host)

    @classmethod
    def unasked(cls, rank: Rank, incarnation: str, host: str, port: int) -> RankLease:
        """The entry of a rank that has to be asked for its lease."""
        place: dict[str, Any] = {"pp_rank": rank.pp, "tp_rank": rank.tp, "host": host, "port": port}
        return cls(**place, incarnation=incarnation, lease_id="", seal_index=0)

    @property
    def address(self) -> str:
        return address_at(self.host, self.port)

    @property
    def block_tables(self) -> tuple[BlockIds, ...]:
        """Block ids by group, if they differ from the engine's."""
        return () if self.block_ids is None else (self.block_ids, *self.more_block_ids)


def _convert(given: Mapping[str, Any], kind: Any) -> Any:
    """Convert a struct that somebody else has filled in. RequestError names a field of another type."""
    try:
        return msgspec.convert(given, kind)
    except RequestError:
        raise
    except Exception as error:
        raise wrong(given, error) from error
