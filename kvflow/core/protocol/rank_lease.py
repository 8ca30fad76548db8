"""The lease of one rank, as tickets and answers of ranks carry it, and how a struct that others fill in is checked.

Tickets come through routers, so nothing in them is trusted. Types and bounds of the fields refuse most of what no
producer would have written. Every refusal is a RequestError that names the field and its value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from kvflow import checks
from kvflow.checks import Int64, is_name, shown
from kvflow.core.bounds import ENTRIES_MAX, Count, TicketLeaseId
from kvflow.core.cache.groups import GROUPS_MAX
from kvflow.core.cache.tensors import NAME_CHARS_MAX
from kvflow.core.plan.topology import Rank
from kvflow.errors import InvalidInput, RequestError
from kvflow.hosts import HOST_CHARS_MAX, PORT_MAX, address_at, is_host, plain_host

_TEXTS = operator.attrgetter("host", "incarnation", "lease_id")

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


def foreign_text(struct: msgspec.Struct) -> RequestError:
    """Error for a text of a class that is not Python's own: no message can carry it."""
    values = msgspec.structs.asdict(struct).items()
    name, value = next((name, value) for name, value in values if isinstance(value, str) and type(value) is not str)
    return RequestError(f"ticket: {name}: expected a str, got the {type(value).__name__} {shown(value)}")


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
        return RequestError(f"ticket: {error if isinstance(error, InvalidInput) else shown(error)}")
    said = checks.refusal(error, given)
    if on_the_way:
        said = _FIELD.sub(lambda found: f"`$.{_NAMED.get(found[1]) or f'kvflow.{found[1]}'}", said, count=1)
    return RequestError(f"ticket: {said}" + (f"; {DICT_EXPECTED}" if "required field" in said else ""))
