"""The lease of one rank in tickets and answers, and the checks of structs with values from outside.

Tickets come through routers, so nothing in them is trusted. Types and bounds of the fields refuse most values that no
producer writes. Every refusal is a RequestError that names the field and its value.
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
from kvflow.checks import Int64, is_name, short_repr
from kvflow.core.bounds import ENTRIES_MAX, WEIGHTS_CHARS_MAX, Count, TicketLeaseId, Weights
from kvflow.core.cache.groups import GROUPS_MAX
from kvflow.core.cache.tensors import NAME_CHARS_MAX
from kvflow.core.plan.topology import Rank
from kvflow.errors import InvalidInput, RequestError
from kvflow.hosts import HOST_CHARS_MAX, PORT_MAX, address_at, is_host, plain_host

_TEXTS = operator.attrgetter("host", "incarnation", "lease_id", "weights")

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Host: TypeAlias = Annotated[str, Meta(max_length=HOST_CHARS_MAX)]
BlockIds: TypeAlias = Annotated[tuple[Int64, ...], Meta(max_length=ENTRIES_MAX)]
BlockTables: TypeAlias = Annotated[tuple[BlockIds, ...], Meta(max_length=GROUPS_MAX)]


class CheckedStructMeta(msgspec.StructMeta):
    """Metaclass of msgspec structs with a constructor that checks the fields' types and bounds, as decoding does."""

    def __call__(self, **given: Any) -> Any:
        if unknown := given.keys() - {*self.__struct_fields__}:
            raise TypeError(f"{self.__name__} has no fields {sorted(unknown)}")
        more = given.get("more_block_ids")
        for ids in (given.get("block_ids"), more, *(more if isinstance(more, tuple | list) else ())):
            if isinstance(ids, set | frozenset):  # msgspec accepts sets, but they have no order
                raise RequestError(f"ticket: block_ids, more_block_ids: expected tuples, got {short_repr(ids)}")
        return _convert(given, self)


@checks.built
@checks.hides_secrets
class RankLease(msgspec.Struct, metaclass=CheckedStructMeta, frozen=True, kw_only=True, omit_defaults=True):
    """The lease of one rank, and the address of the rank's side channel."""

    pp_rank: Count
    tp_rank: Count
    lease_id: TicketLeaseId
    """Secret id of the lease; "" if readers have to ask the rank for its lease."""
    seal_index: Count
    """Index of the lease's seal in the rank's table of seals."""
    incarnation: Name
    host: Host = ""
    """Host of the rank's side channel. In a ticket's dict the first rank's host is `remote_host`, which routers read.
    """
    port: Int64 = 0
    """Port of the rank's side channel. In a ticket's dict the first rank's port is `remote_port`."""
    block_ids: BlockIds | None = None
    """Block ids of the first group for readers of this rank, if the blocks are copied to host buffers and so have other
    ids than in the engine; else None."""
    more_block_ids: BlockTables = ()
    """Block ids of each group after the first for readers of this rank; only if `block_ids` is set."""
    pending: bool = False
    """True if some tokens could not be read yet when this object was made. Then readers must fetch the seal before any
    block.
    """
    payload: bool = False
    """True if the producer has promised a payload: bytes that `Lease.complete` sends to readers."""
    held: bool = True
    """True if the producer holds the blocks for `SealLocation.hold_s` after the lease's end. If False, readers have to
    fetch the seal after the last byte has landed."""
    weights: Weights = ""
    """Version of the weights with which the rank has computed the blocks. No checksum covers it: readers from before
    this field ignore it."""

    def __post_init__(self) -> None:
        if {*map(type, _TEXTS(self))} != {str}:
            raise str_subclass_error(self)
        if self.weights and not is_name(self.weights, WEIGHTS_CHARS_MAX):
            raise RequestError(f"ticket: weights {self.weights!a} is not a printable name")
        host = check_rank_address(self.host, self.port, self.incarnation)
        if host != self.host:  # `plain_host` has normalized it
            msgspec.structs.force_setattr(self, "host", host)

    @classmethod
    def without_lease_id(cls, rank: Rank, incarnation: str, host: str, port: int) -> RankLease:
        """Return a ticket's entry for a rank without a lease id: readers have to ask the rank for its lease."""
        place: dict[str, Any] = {"pp_rank": rank.pp, "tp_rank": rank.tp, "host": host, "port": port}
        return cls(**place, incarnation=incarnation, lease_id="", seal_index=0)

    @property
    def address(self) -> str:
        return address_at(self.host, self.port)

    @property
    def block_tables(self) -> tuple[BlockIds, ...]:
        """Block ids for readers of this rank, by group; () if they are the engine's block ids."""
        return () if self.block_ids is None else (self.block_ids, *self.more_block_ids)


def _convert(given: Mapping[str, Any], kind: Any) -> Any:
    """Convert `given`, values by field, to a struct of type `kind`.

    RequestError names a field with an invalid value.
    """
    try:
        return msgspec.convert(given, kind)
    except RequestError:
        raise
    except Exception as error:
        raise invalid_struct(given, error) from error


# Cached: tickets name the same few ranks again and again. The types of the fields bound the cached texts.
@lru_cache(maxsize=1024)
def check_rank_address(host: str, port: int, incarnation: str) -> str:
    """Check the address and incarnation of a rank. RequestError names an invalid value.

    Return `host` in normal form: an IPv6 address is compressed and has no brackets.
    """
    if not 0 < port <= PORT_MAX:
        raise RequestError(f"ticket: remote_port {port} is not in 1..{PORT_MAX}")
    plain = plain_host(host)
    if plain is None or not is_host(plain):
        raise RequestError(
            f"ticket: remote_host {host[:80]!a} is not a host that can be connected to: "
            "expected a name or address alone"
        )
    if not is_name(incarnation, NAME_CHARS_MAX):
        raise RequestError(f"ticket: incarnation {incarnation[:80]!a} is not a printable name")
    return plain


def str_subclass_error(struct: msgspec.Struct) -> RequestError:
    """Return the error for `struct`, which has a value of a subclass of str.

    Messages can only carry plain str values.
    """
    values = msgspec.structs.asdict(struct).items()
    name, value = next((name, value) for name, value in values if isinstance(value, str) and type(value) is not str)
    return RequestError(f"ticket: {name}: expected a str, got the {type(value).__name__} {short_repr(value)}")


DICT_EXPECTED = "expected a dict of `lease.ticket.to_params()`"
_NAMED = {"engine_id": "remote_engine_id", "request_id": "remote_request_id", "block_ids": "remote_block_ids"}
_NAMED |= {"ranks[0].host": "remote_host", "ranks[0].port": "remote_port", "tp_size": "tp_size"}
_FIELD = re.compile(r"`\$\.(ranks\[0\]\.(?:host|port)|\w+)")


def invalid_struct(given: Mapping[str, Any], error: Exception, *, in_transit: bool = False) -> RequestError:
    """Return the RequestError for `error`, which was raised when a struct was made from `given`, values by field.

    `in_transit`: the values came in a ticket's dict, so the error names the keys of that dict.
    """
    if isinstance(error, UnicodeEncodeError):
        is_it = partial(operator.is_, error.object)
        where = [name for name, one in given.items() if type(one) in (list, tuple) and any(map(is_it, one))]
        return RequestError(f"ticket: {', '.join(where)}: UTF-8 cannot carry {short_repr(error.object)}")
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(f"ticket: {error if isinstance(error, InvalidInput) else short_repr(error)}")
    said = checks.refused_value_text(error, given)
    if in_transit:
        said = _FIELD.sub(lambda found: f"`$.{_NAMED.get(found[1]) or f'kvflow.{found[1]}'}", said, count=1)
    hint = f"; {DICT_EXPECTED}" if "required field" in said else ""
    if "`int`, got `str`" in said:
        hint = "; a number is written without quotes"
    return RequestError(f"ticket: {said}{hint}")
