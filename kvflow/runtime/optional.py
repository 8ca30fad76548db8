"""The seam from the core to the optional parts that requests of one registered cache may need.

Each part is imported and begun at its first use. Its module, a row of `parts.PARTS`, has a function `begin(host)`,
which takes the `part.PartHost` and returns what one of the protocols below describes. The core calls nothing else of a
part.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias, cast

from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.protocol import messages
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, KVFlowError, RequestError
from kvflow.parts import REQUESTS, import_part, importing_part
from kvflow.runtime.channel.protocol import Answered
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.load import Load, LoadPerformer
from kvflow.runtime.load.plan import MatchedChunks, Plan
from kvflow.runtime.load.requests import GivenTicket, LoadReport
from kvflow.runtime.memory import BlockCopier, HostBlocks
from kvflow.runtime.peers.peer import Source
from kvflow.runtime.producer.blocks import LeaseCopies, OfferedBlocks
from kvflow.runtime.producer.lease import LeaseGrowth
from kvflow.transport.device.cache_device import CacheDevice

ReadBlocks: TypeAlias = Callable[[Load, Flight, Plan], Awaitable[bool]]
"""Function that reads a load's blocks in one of four ways: straight into the cache, through buffers, while the producer
computes the blocks, or with a comparison of digests. Awaiting its result gives True if the leases covered all reads."""


class Answering(Protocol):
    """What peers need of an optional part that has a type of requests (`parts.REQUESTS`)."""

    def answer(self, question: messages.ReaderRequest) -> Answered: ...


class PendingTickets(Protocol):
    """Loads of pending tickets, with an offer that is still to come."""

    async def perform(self, load: Load) -> LoadReport: ...

    async def await_offer_of(self, load: Load) -> None: ...

    async def await_offers(self, ticket: Ticket, on_lease: Callable[[Source, float], None]) -> Ticket: ...

    async def release(self, ticket: Ticket) -> bool: ...

    def redirect_readers(self, request_id: str, reason: str, at: GivenTicket, instead: GivenTicket | None) -> None: ...


class Growing(Answering, Protocol):
    """What readers need of `kvflow.growing`: leases that grow, and pending tickets."""

    @property
    def pending_tickets(self) -> PendingTickets: ...

    def add_late_blocks(self, load: Load, tickets: Sequence[Ticket]) -> LoadPerformer: ...

    def ask_about_leases(self, load: Load, sources: Sequence[Source], matched: MatchedChunks) -> None: ...

    def read_growing(self, load: Load, flight: Flight, plan: Plan) -> Awaitable[bool]: ...


class Staging(Protocol):
    """What is needed of `kvflow.staging`: reads of loads through buffers, and the copies of leased blocks."""

    async def prepare(self) -> None: ...

    def read_buffered(self, load: Load, flight: Flight, plan: Plan) -> Awaitable[bool]: ...

    @property
    def lease_copies(self) -> Callable[[], LeaseCopies]: ...


class Verify(Answering, Protocol):
    """What loads, and the answers to readers, need of `kvflow.verify`."""

    @property
    def problem(self) -> str: ...

    def read_verified(self, reader: ReadBlocks | None, load: Load, flight: Flight, plan: Plan) -> Awaitable[bool]: ...


class Failover(Protocol):
    """What loads need of `kvflow.failover`: loads that read from one producer after the other."""

    def performer(self, tickets: Sequence[Ticket]) -> LoadPerformer: ...


class OptionalParts:
    """The optional parts that one registered cache has used. `what` of each method is the call that needs the part.

    Each method raises RequestError, or `kind`, if the part is not installed.
    """

    def __init__(self) -> None:
        self._host: object = None
        self._begun: dict[str, object] = {}

    def attach(self, host: object) -> None:
        """Give the `part.PartHost` to the parts that begin later. Called once, before the first use of a part."""
        self._host = host

    def growing(self, what: str) -> Growing:
        return cast(Growing, self._part("growing", what, RequestError))

    def staging(self, what: str, kind: type[KVFlowError] = RequestError) -> Staging:
        return cast(Staging, self._part("staging", what, kind))

    def verify(self, what: str, kind: type[KVFlowError] = RequestError) -> Verify:
        return cast(Verify, self._part("verify", what, kind))

    def failover(self, what: str) -> Failover:
        return cast(Failover, self._part("failover", what, RequestError))

    def answers(self) -> Mapping[type[messages.ReaderRequest], Callable[[messages.ReaderRequest], Answered]]:
        """Return the functions that answer requests of peers to optional parts, by type of request."""
        return {kind: partial(self._answer, name) for kind, name in requests_of_parts().items()}

    def _answer(self, name: str, question: messages.ReaderRequest) -> Answered:
        what = f"a question of kind {question.__struct_config__.tag!r}"
        return cast(Answering, self._part(name, what, RequestError)).answer(question)

    def _part(self, name: str, what: str, kind: type[KVFlowError]) -> object:
        begun = self._begun.get(name)
        if begun is None:
            begun = self._begun[name] = import_part(name, what, kind).begin(self._host)
        return begun


def requests_of_parts() -> Mapping[type[messages.ReaderRequest], str]:
    """Return the name of each installed part that has a type of requests, by that type."""
    found: dict[type[messages.ReaderRequest], str] = {}
    for name, module in REQUESTS.items():
        with contextlib.suppress(RequestError), importing_part(name, "a peer", RequestError):
            found[importlib.import_module(module).REQUEST] = name
    return found


def lease_growth(
    blocks: OfferedBlocks, answer_readers: Callable[[str], object], block_ids_max: int, what: str
) -> LeaseGrowth:
    """Return what serves leases that grow. `answer_readers`: answers readers that have asked about a request's lease.

    RequestError, naming `what`, if `kvflow.growing` is not installed.
    """
    module = import_part("growing", what)
    return cast(LeaseGrowth, module.GrowingLeases(blocks, answer_readers, block_ids_max))


def host_blocks(
    groups: Sequence[CacheGroup], config: Config, copy_blocks: BlockCopier | None, device: CacheDevice
) -> Sequence[HostBlocks]:
    """Allocate and return host blocks for each of `groups`. For the copy thread, since it touches every page.

    ConfigError if `kvflow.staging` is not installed, or Config.host_buffer_bytes_max is less than a block of a group.
    """
    what = f"a cache on {device.where.kind!r}, with Config.staging {config.staging!r},"
    buffers = import_part("staging", what, ConfigError).host_buffers(groups, config, copy_blocks, device)
    return cast(Sequence[HostBlocks], buffers)
