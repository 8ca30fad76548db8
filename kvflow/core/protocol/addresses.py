"""Addresses of ranks, and names of their transport agents, as tickets and error messages contain them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

from kvflow import checks
from kvflow.checks import short_repr
from kvflow.config import ENGINE_ID_CHARS_MAX
from kvflow.core.bounds import Count, Name, NetAddress
from kvflow.core.plan.topology import Rank
from kvflow.errors import PeerError, RequestError
from kvflow.hosts import address_at, is_host, split_address

_AGENT_NAME = re.compile(r"/([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})#(.+)")

UNKNOWN_ENGINE = "unknown engine"
"""First words of the reason with which a rank refuses a question that was meant for another engine."""

ErrorT = TypeVar("ErrorT", bound=PeerError)


class Address(NamedTuple):
    """A rank of an engine, and the address at which its side channel is expected to listen."""

    engine_id: Name
    rank: Rank
    address: NetAddress

    def __str__(self) -> str:
        return f"engine {self.engine_id!r} ({self.rank}) at {self.address}"

    def failure(self, kind: type[ErrorT], why: str, *, retry_after_s: float | None = None) -> ErrorT:
        """Return an error of class `kind`: its message names this peer's engine, rank and address, then says `why`."""
        return kind(f"{self}: {why}", peer=self.address, engine_id=self.engine_id, retry_after_s=retry_after_s)


def side_channel_address(value: object, what: str) -> str:
    """Return `value`, an address tcp://host:port to connect to, in normal form. RequestError if it is none."""
    host, port = split_address(checks.text(value, what), what=what, error=RequestError)
    if not is_host(host) or not port:
        raise RequestError(f"{what}: expected a host and port to connect to, got {short_repr(value)}")
    return address_at(host, port)


EngineId: TypeAlias = Annotated[str, partial(checks.name, most=ENGINE_ID_CHARS_MAX)]
SideChannel: TypeAlias = Annotated[str, side_channel_address]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """The address of one rank of an engine. The constructor raises RequestError, which names an invalid field.

    The ports of the engine's other ranks are computed from this address by the rule of `Config.listen`.
    """

    engine_id: EngineId
    address: SideChannel
    """Address of the rank's side channel, tcp://host:port (`Runtime.address`)."""
    dp_rank: Count = 0
    pp_rank: Count = 0
    tp_rank: Count = 0

    def __post_init__(self) -> None:
        checks.normalize_fields(self, RequestError)


def peer_at(at: Address) -> PeerAddress:
    """Return the rank at `at` as a `PeerAddress`. Raise RequestError if no rank can have that address."""
    dp, pp, tp = at.rank
    return PeerAddress(engine_id=at.engine_id, address=at.address, dp_rank=dp, pp_rank=pp, tp_rank=tp)


def agent_name(engine_id: str, rank: Rank, incarnation: str) -> str:
    """Return the name of a rank's transport agent, unique to one registration of the rank's cache (`incarnation`)."""
    return f"{engine_id}/{rank.dp}.{rank.pp}.{rank.tp}#{incarnation}"


def parse_agent_name(agent: str, engine_id: str) -> tuple[Rank, str] | None:
    """Return the rank and the incarnation in `agent`, a name from `agent_name`.

    Return None if `agent` has another form or names another engine than `engine_id`.
    """
    found = _AGENT_NAME.fullmatch(agent.removeprefix(engine_id)) if agent.startswith(engine_id) else None
    return None if found is None else (Rank(*map(int, found.groups()[:3])), found[4])
