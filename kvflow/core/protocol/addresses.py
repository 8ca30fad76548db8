"""Names of ranks: in tickets, of transport agents, and in errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

from kvflow import checks
from kvflow.checks import shown
from kvflow.config import ENGINE_ID_CHARS_MAX
from kvflow.core.bounds import Count, Name, NetAddress
from kvflow.core.plan.topology import Rank
from kvflow.errors import PeerError, RequestError
from kvflow.hosts import address_at, is_host, split_address

_LIFE = re.compile(r"/([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})#(.+)")

UNKNOWN_ENGINE = "unknown engine"
"""First words of a refusal by another engine than the one that was asked for."""

ErrorT = TypeVar("ErrorT", bound=PeerError)


class Address(NamedTuple):
    """A rank of an engine, and where its side channel is believed to listen."""

    engine_id: Name
    rank: Rank
    address: NetAddress

    def __str__(self) -> str:
        return f"engine {self.engine_id!r} ({self.rank}) at {self.address}"

    def failure(self, kind: type[ErrorT], why: str, *, retry_after_s: float | None = None) -> ErrorT:
        """Return an error that names the rank."""
        return kind(f"{self}: {why}", peer=self.address, engine_id=self.engine_id, retry_after_s=retry_after_s)


def _side_channel(value: object, what: str) -> str:
    host, port = split_address(checks.text(value, what), what=what, error=RequestError)
    if not is_host(host) or not port:
        raise RequestError(f"{what}: expected a host and port to connect to, got {shown(value)}")
    return address_at(host, port)


EngineId: TypeAlias = Annotated[str, partial(checks.name, most=ENGINE_ID_CHARS_MAX)]
SideChannel: TypeAlias = Annotated[str, _side_channel]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """One rank of an engine, and where its side channel listens (`Runtime.address`).

    The engine's other ranks are found by their ports, as `Config.listen` gives them out. RequestError names a field
    that cannot be.
    """

    engine_id: EngineId
    address: SideChannel
    dp_rank: Count = 0
    pp_rank: Count = 0
    tp_rank: Count = 0

    def __post_init__(self) -> None:
        checks.settle(self, RequestError)


def agent_name(engine_id: str, rank: Rank, incarnation: str) -> str:
    """Name of the transport agent, which no other incarnation of the rank has."""
    return f"{engine_id}/{rank.dp}.{rank.pp}.{rank.tp}#{incarnation}"


def life_of(agent: str, engine_id: str) -> tuple[Rank, str] | None:
    """Rank and incarnation whose `agent_name` this is, of that engine; None for agents of another make."""
    found = _LIFE.fullmatch(agent.removeprefix(engine_id)) if agent.startswith(engine_id) else None
    return None if found is None else (Rank(*map(int, found.groups()[:3])), found[4])
