"""An incarnation: all objects that are made when a KV cache is registered, in order, and the answers to peers."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from kvflow import checks
from kvflow.checks import counted, error_text
from kvflow.config import Config, config_for_device
from kvflow.core.cache.groups import (
    CacheGroup,
    GroupKind,
    LayerSet,
    check_sets_disjoint,
    facts_of_engine,
    layer_sets,
    named_layers,
    sets_of,
)
from kvflow.core.cache.regions import HOST, Device, device_of, map_spans
from kvflow.core.cache.state import SegmentLayout
from kvflow.core.cache.tensors import TensorAddresses, has_addresses
from kvflow.core.plan.topology import CacheShare, Rank, cache_share_of, check_heads
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import UNKNOWN_ENGINE, Address
from kvflow.core.protocol.claims import regions_to_wire
from kvflow.core.protocol.compatibility import compatibility_of
from kvflow.core.protocol.proof import SealTable
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, InvalidInput, UsageError
from kvflow.hosts import address_at
from kvflow.logs import logger_of
from kvflow.parts import PARTS
from kvflow.runtime.channel.protocol import Answered, SideChannel, refusal
from kvflow.runtime.clock import Clock
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.load.flight_resources import FlightResources, LoadThrottle, Poller, SealSlots, read_permit_queue
from kvflow.runtime.load.leases import LeaseIdNotifier, RemoteLeases
from kvflow.runtime.load.loader import Loader
from kvflow.runtime.load.steps import LoadSteps
from kvflow.runtime.memory import BlockCopier, HostBlocks, RankMemory
from kvflow.runtime.optional import OptionalParts, host_blocks
from kvflow.runtime.part import Ending, Part, PartHost, PartRuntime
from kvflow.runtime.peers.handshake import Agents, Handshakes
from kvflow.runtime.peers.peer import LocalRank, Resolver
from kvflow.runtime.peers.table import HandshakeClient, Peers
from kvflow.runtime.peers.ticket_resolver import TicketResolver
from kvflow.runtime.producer.blocks import OfferedBlocks
from kvflow.runtime.producer.goodbyes import Goodbyes
from kvflow.runtime.producer.serving import Serving
from kvflow.runtime.rank import RankContext, Weights
from kvflow.runtime.records import Observers
from kvflow.runtime.statistics import PartStatistics
from kvflow.transport.base import MemoryUse, Transport, TransportError, is_staged

logger = logger_of(__name__)

_NAME_CHARS_SHOWN = 80
_RELEASE_SLACK_S = 1.0  # a part that takes all of its time has still to say so
_NAMED_MAX = 5
_BroughtT = TypeVar("_BroughtT")
_USES = {
    "both": MemoryUse.SERVED | MemoryUse.READ_INTO,
    "producer": MemoryUse.SERVED,
    "consumer": MemoryUse.READ_INTO,
}
"""How the cache's memory is registered with the transport, by Config.role."""


class OpenRegistration(Protocol):
    """What an incarnation needs of its `registration.Registration`: a name, an open agent, a poller, and its tasks."""

    incarnation: str
    agent_name: str
    transport: Transport
    poller: Poller

    def spawn(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFacts:
    """What one runtime gives to each of its incarnations."""

    config: Config
    rank: Rank
    host: str
    port: int
    """Where peers reach the runtime's side channel."""
    parts: Sequence[Part]
    clock: Clock
    token_hex: Callable[[int], str]
    observers: Observers
    weights: Weights
    side_channel: SideChannel
    seals: SealTable
    copy_thread: CopyThread


class Incarnation:
    """One registered cache of a rank: makes all objects that exist only while it is registered, and ends them."""

    def __init__(
        self,
        runtime: RuntimeFacts,
        registration: OpenRegistration,
        config: Config,
        memory: RankMemory,
        resources: FlightResources,
        local: LocalRank,
        metadata: messages.Metadata,
    ) -> None:
        """Make every object, each from those that it uses.

        `config` has the limits for the cache's kind of device. `local` describes this rank for comparison with peers,
        `metadata` describes it to readers.
        """
        transport, side_channel = registration.transport, runtime.side_channel
        context = self._context = RankContext(
            config=config,
            rank=runtime.rank,
            incarnation=registration.incarnation,
            local=local,
            host=runtime.host,
            port=runtime.port,
            clock=runtime.clock,
            token_hex=runtime.token_hex,
            spawn=registration.spawn,
            observers=runtime.observers,
            weights=runtime.weights,
        )
        parts, optional = runtime.parts, OptionalParts()
        notifier, agents = LeaseIdNotifier(transport, local.reader), Agents(transport, registration.spawn)
        own_handshakes = Handshakes(context, side_channel, agents, notifier)
        brought = ((part.name, part.handshakes(context, transport, own_handshakes)) for part in parts)
        handshakes: HandshakeClient = _only_one("handshakes", brought) or own_handshakes
        self.peers = peers = Peers(context, agents, handshakes)
        kvflow_resolver = TicketResolver(context, peers)
        resolvers = ((part.name, part.resolver(context, peers, kvflow_resolver)) for part in parts)
        resolver: Resolver = _only_one("resolver", resolvers) or kvflow_resolver
        leases = RemoteLeases(context, peers, resolver, kvflow_resolver, notifier, optional)
        throttle = LoadThrottle(resources.poller)
        steps = LoadSteps(context, peers, resolver, leases, memory, resources, throttle, optional)
        self.loader = Loader(context, peers, resolver, leases, resources, throttle, steps, optional)
        copies = (lambda: optional.staging("a lease of copied blocks").lease_copies()) if memory.staging else None
        expect = transport.expect_notifications
        blocks = OfferedBlocks(context, resources.ledger, runtime.seals, runtime.copy_thread, copies, expect)
        self.serving = serving = Serving(context, blocks)
        services = [part.reader_service(context, serving, metadata) for part in parts]
        self.reader_services = [service for service in services if service is not None]
        """The services that answer readers that do not run kvflow."""
        self.goodbyes = Goodbyes(context, side_channel, awaits_removal=bool(metadata.device_memory))
        self.host = PartHost(
            context=context,
            peers=peers,
            resolver=resolver,
            kvflow_resolver=kvflow_resolver,
            leases=leases,
            loader=self.loader,
            steps=steps,
            serving=serving,
            memory=memory,
            resources=resources,
            transport=transport,
            side_channel=side_channel,
            optional=optional,
        )
        optional.attach(self.host)
        self._metadata = metadata
        self.begun_parts: list[Part] = []
        """The runtime's parts (optional features) that use this cache: `Part.registered` has returned for each.

        When the cache ends, only these parts are ended: a part that refused the cache may belong to another runtime.
        """
        self._part_problems: dict[tuple[str, str], str] = {}
        """The first error of each method of a part that is called at its end, as text, by the part's and its name."""
        self._answers: dict[type[Any], Callable[[Any], Answered]] = {
            messages.ReleaseRequest: serving.release,
            messages.LeaseRequest: serving.lease_answers.answer,
            messages.Goodbye: self._on_goodbye,
            **optional.answers(),
        }
        for part in parts:
            self._answers.update(part.answers)

    def answer(self, header: codec.Header, request: messages.Request, *, draining: bool) -> Answered:
        """Return the answer to a peer's request, or a future of the answer.

        Refuses a request for another engine or rank, and a request from a peer with an incompatible cache, which
        `header` shows. If `draining`, only readers of a request with an open lease get this rank's metadata.
        """
        local, target = self._context.local, request.target
        ours = local.caller
        if target.engine_id != ours.engine_id:
            asked_for = target.engine_id[:_NAME_CHARS_SHOWN]
            it_is = f"{UNKNOWN_ENGINE}: expected {asked_for!r}, this is {ours.engine_id!r}"
            if getattr(request, "reader", "") == local.reader:
                it_is += ", the reader itself: the peer's address leads back to it"
            return msgspec.structs.replace(refusal(it_is), listens=ours)
        if header.fingerprint != local.compatibility.fingerprint():
            own_facts = {"compatibility": local.compatibility, "cache_shares": local.cache_shares}
            return msgspec.structs.replace(refusal("the caches are not compatible"), **own_facts)
        if target.rank != ours.rank:
            return refusal(f"expected {target.rank}, this is {self._context.rank}")
        if isinstance(request, messages.MetadataRequest):
            if draining and not self.serving.has_open_lease(request.request_id):
                return refusal(f"engine {ours.engine_id!r} is draining", transient=True)
            if request.caller is not None:
                self.goodbyes.remember(request.caller)
            return self._metadata
        try:
            return self._answers[type(request)](request)
        except (codec.WireError, InvalidInput) as error:
            return refusal(str(error))

    def _on_goodbye(self, goodbye: messages.Goodbye) -> Answered:
        noted, removal = messages.Ack(incarnation=self._context.incarnation), self.peers.on_goodbye(goodbye)
        if removal is None or not goodbye.awaits_removal:
            return noted
        answer: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        removal.add_done_callback(lambda _: None if answer.done() else answer.set_result(noted))
        return answer

    def on_notification(self, payload: bytes) -> None:
        """Apply a notification of a reader, whether it runs kvflow or not."""
        for service in self.reader_services:
            if service.apply_notification(payload):
                return
        self.serving.on_notification(payload)

    async def begin_parts(self, parts: Sequence[Part], runtime: PartRuntime) -> None:
        """Call `registered` of each part (optional feature) of the runtime, in order, with this cache."""
        for part in parts:
            await part.registered(runtime, self.host)
            self.begun_parts.append(part)

    @property
    def busy(self) -> bool:
        """True if a lease or load is open, a part (optional feature) has work under way, or blocks are quarantined."""
        loading = self.loader.statistics
        open_now = self.serving.statistics.open_leases or loading.open_loads or loading.quarantines
        return bool(open_now or any(now.open_requests for now in self.part_statistics().values()))

    def part_statistics(self) -> dict[str, PartStatistics]:
        """Return the counts of the begun parts (optional features) that have counts, by name."""
        counts = {}
        for part in self.begun_parts:
            with self._noting_errors(part, "statistics"):
                if (now := part.statistics) is not None:
                    counts[part.name] = now
        return counts

    @contextmanager
    def _noting_errors(self, part: Part, method: str) -> Iterator[None]:
        """Note an error that a part raises, so that all others are ended all the same. `release_parts` returns it."""
        try:
            yield
        except Exception as error:
            if (part.name, method) not in self._part_problems:
                logger.exception("engine %r: part %s: %s failed", self._context.config.engine_id, part.name, method)
                why = f"{type(error).__name__}: {error_text(error) or 'not done in time'}"
                self._part_problems[part.name, method] = f"{method} of part {part.name!r}: {why}"

    async def drain(self, deadline_s: float, successor: Ticket | None = None) -> bool:
        """Wait up to `deadline_s` seconds until all leases, loads and work of parts (optional features) have ended.

        Refuse readers' questions that wait for a lease. After the deadline, end the remaining work and wait for its
        end. Return whether everything ended within `deadline_s`. Cancelling stops the waiting.

        `successor`: any ticket of the engine that takes this one's place. Then the readers that wait for a lease are
        redirected there, and goodbyes name that engine.
        """
        serving, loader, engine_id = self.serving, self.loader, self._context.config.engine_id
        draining = f"engine {engine_id!r} is draining"
        if successor is None:
            serving.lease_answers.refuse_questions(draining)
        else:
            self.goodbyes.successor = _same_rank(successor, self._context.rank)
            serving.lease_answers.refuse_questions(draining, partial(_pending_params, successor))
        waits = [serving.drained(), loader.drained(), self._parts_drained()]
        finished = await _wait_for_all(waits, deadline_s)
        if not finished:
            what = f"leases of {_first_few(serving.open_requests)}, loads of {_first_few(loader.open_requests)}"
            logger.warning("engine %r: open after draining for %s s, ending it now: %s", engine_id, deadline_s, what)
        await self.end()
        return finished

    def stop(self, why: Ending) -> None:
        """Take no new work, revoke all leases, and begin to end loads and the work of parts. Does not wait."""
        self.serving.close()
        self.loader.close(unregistered=why is Ending.UNREGISTERED)
        self.end_parts(why)

    def end_parts(self, why: Ending, wait_s: float = 0.0) -> None:
        """Call `end` of all begun parts (optional features), in order."""
        for part in self.begun_parts:
            with self._noting_errors(part, "end"):
                part.end(why, wait_s)

    async def _parts_drained(self) -> None:
        """Wait until no begun part (optional feature) has work under way."""
        for part in self.begun_parts:
            with self._noting_errors(part, "drained"):
                await part.drained()

    async def release_parts(self, timeout_s: float) -> str:
        """Call `release` of all begun parts, in order, each for about `timeout_s` at most.

        Return "" if all have released the cache, and none has raised an error since it began. Otherwise return why not.
        """
        problems = []
        for part in self.begun_parts:
            with self._noting_errors(part, "release"):
                async with asyncio.timeout(timeout_s + _RELEASE_SLACK_S):
                    problems.append(await part.release(timeout_s))
        problems += [why for (_, method), why in self._part_problems.items() if method != "statistics"]
        return "; ".join(filter(None, problems))

    async def end(self, *, broken: bool = False) -> None:
        """Call `stop`, and wait until leases, loads and the work of parts have ended, at most Config.ending_s.

        If `broken`, do not wait for loads: it may never be known when their reads end.
        """
        self.stop(Ending.CLOSED)
        serving, loader, config = self.serving, self.loader, self._context.config
        waits = [serving.drained()] if broken else [serving.drained(), loader.drained()]
        waits.append(self._parts_drained())
        if not await _wait_for_all(waits, config.ending_s):
            loads = counted(len(loader.quarantines), "load")
            what = f"bytes may still land of {loads}, leases of {_first_few(serving.open_requests)}"
            logger.warning("engine %r: still open after another %s s: %s", config.engine_id, config.ending_s, what)

    async def wait_for_copies(self) -> str:
        """Wait until no copy between the cache and buffers runs, at most Limits.transport_close_timeout_s.

        Return "" if nothing uses the cache now, else a text for an error that says what still uses it.
        """
        bound_s = self._context.config.limits.transport_close_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                with suppress(ConfigError):  # no thread could be started, so no copy runs
                    await self.host.resources.copy_thread.run(lambda: None)  # jobs run one after another
        except TimeoutError:
            return f"a copy still runs after {bound_s} s"
        loads, leases = self.loader.open_requests, self.serving.open_requests
        parts = {name: now.open_requests for name, now in self.part_statistics().items() if now.open_requests}
        if not (loads or leases or parts):
            return ""
        return f"bytes of loads {loads} may still land, leases {leases} hold their blocks, requests of parts: {parts}"


async def register(
    runtime: RuntimeFacts,
    registration: OpenRegistration,
    groups: Sequence[CacheGroup],
    copy_blocks: BlockCopier | None,
) -> Incarnation:
    """Check the layers of `groups`, register their memory with the transport, and return the new incarnation.

    `copy_blocks`: the engine's function for copies between host blocks and the cache; None for kvflow's own. UsageError
    if it is not callable, LayoutError if layers do not fit together, ConfigError if the memory cannot be registered, or
    if a part of the runtime cannot use it.
    """
    config, transport = runtime.config, registration.transport
    if copy_blocks is not None and not callable(copy_blocks):
        raise UsageError(f"copy_blocks: expected a function, got {checks.short_repr(copy_blocks)}")
    if runtime.parts and any(group.kind is GroupKind.SHARDED for group in groups):
        names = ", ".join(part.name for part in runtime.parts)
        raise ConfigError(f"a cache with sharded tokens (kind 'sharded') works without parts, this runtime has {names}")
    sets = layer_sets(groups, config.tp_size)
    where = device_of(named_layers(sets))
    staged = is_staged(where.kind, config.staging, transport.reaches(where.kind))
    try:
        if not staged or all(has_addresses(layer_set.caches) for layer_set in sets):
            check_sets_disjoint([(groups[layer_set.group], layer_set.regions) for layer_set in sets])
        memory = await _prepare_memory(config, runtime.copy_thread, groups, sets, where, staged, copy_blocks)
        registered = await _register(runtime, registration, memory)
        optional, uses_scratch = registered.host.optional, memory.scratch != "never"
        if memory.target_device.allocates_at_registration and uses_scratch and config.role != "producer":
            await optional.staging("Config.scratch", ConfigError).prepare()
        if config.verify_share:  # now, not when the first load is to be verified
            optional.verify("Config.verify_share", ConfigError)
    except (TransportError, RuntimeError) as error:
        layers = counted(sum(len(layer_set.caches) for layer_set in sets), "layer")
        raise ConfigError(f"cannot register {layers}: {error}") from error
    for group in groups:
        logger.info(
            "engine %r (%s): registered a KV cache of %s, %s of %s on %s%s%s",
            config.engine_id,
            runtime.rank,
            counted(len(group.layers), "layer"),
            counted(group.num_blocks, "block"),
            counted(group.block_size_bytes, "byte"),
            f"{memory.device.where.kind}:{memory.device.where.number}",
            "" if len(groups) == 1 else f", group {group.name!r}",
            ", through host buffers" if memory.staging else "",
        )
    return registered


async def _prepare_memory(
    config: Config,
    copy_thread: CopyThread,
    groups: Sequence[CacheGroup],
    sets: tuple[LayerSet, ...],
    where: Device,
    staged: bool,
    copy_blocks: BlockCopier | None,
) -> RankMemory:
    """Return the memory of a cache that is being registered: its layers in `sets`, which are on the device `where`.

    If `staged`, allocate host blocks through which peers read it. Otherwise check that peers can read the device.
    """
    served = sets
    staging: Sequence[HostBlocks] = ()
    device = await copy_thread.cache_device(where, engine_copies=staged and copy_blocks is not None)
    if staged:  # on the copy thread, since it touches every page of the host blocks
        staging = await copy_thread.run(lambda: host_blocks(groups, config, copy_blocks, device))
        served = tuple(
            layer_set
            for index, blocks in enumerate(staging)
            for layer_set in sets_of(index, blocks.layers, config.tp_size)
        )
    elif not device.on_host:
        spans = map_spans(named_layers(sets))
        await copy_thread.run(lambda: device.check(spans))
    addresses = TensorAddresses(named_layers((*sets, *served)))
    return RankMemory(
        groups=groups,
        own_layers=sets,
        device=device,
        staging=staging,
        served_layers=served,
        addresses=addresses,
        scratch="never" if config.scratch == "auto" and not {"staging", "growing"} <= PARTS.keys() else config.scratch,
    )


async def _register(runtime: RuntimeFacts, registration: OpenRegistration, memory: RankMemory) -> Incarnation:
    """Register `memory`, and the memory of seals, with the transport. Return the new incarnation."""
    transport, seals, groups, sets = registration.transport, runtime.seals, memory.groups, memory.served_layers
    config = config_for_device(runtime.config, memory.target_device.where.kind)
    shares = tuple(_cache_share(config, groups, layer_set) for layer_set in sets)
    check_heads(shares)
    resources = FlightResources(
        ledger=BlockLedger(groups, memory.addresses),
        seal_slots=SealSlots(config.limits.source_ranks_max),
        permit_queue=read_permit_queue(config, grows=runtime.config.limits.peer_in_flight_bytes_max == 0),
        poller=registration.poller,
        copy_thread=runtime.copy_thread,
        clock=runtime.clock,
        reads_max=config.limits.slices_in_flight_max,
    )
    regions = tuple(layer_set.regions for layer_set in sets)
    layers = named_layers(sets)
    await transport.register(map_spans(layers), regions[0].device, [groups, *layers], _USES[config.role])
    await transport.register([seals.span], HOST, seals, MemoryUse.SERVED)
    await transport.register([resources.seal_slots.table.span], HOST, resources.seal_slots, MemoryUse.READ_INTO)
    local = LocalRank(
        reader=registration.agent_name,
        caller=Address(config.engine_id, runtime.rank, address_at(runtime.host, runtime.port)),
        compatibility=compatibility_of([layer_set.layout for layer_set in sets], model=config.model),
        cache_shares=shares,
        regions=regions,
        groups=tuple(facts_of_engine(group, config.tp_size) for group in groups),
    )
    agent_metadata, device_memory = await transport.metadata(), await transport.device_memory()
    metadata = messages.Metadata(
        engine_id=config.engine_id,
        incarnation=registration.incarnation,
        cache_shares=local.cache_shares,
        agent_metadata=agent_metadata,
        agent_metadata_crc32=zlib.crc32(agent_metadata),
        regions=tuple(map(regions_to_wire, regions)),
        groups=local.groups,
        seals=messages.SealLocation(address=seals.address(0), count=seals.count, hold_s=config.limits.seal_hold_s),
        staged=bool(memory.staging),
        device_memory=device_memory,
        device_memory_crc32=zlib.crc32(device_memory),
    )
    return Incarnation(runtime, registration, config, memory, resources, local, metadata)


def _cache_share(config: Config, groups: Sequence[CacheGroup], layer_set: LayerSet) -> CacheShare:
    said = groups[layer_set.group].num_kv_heads
    heads = config.num_kv_heads if said is None else said
    if isinstance(layer_set.layout, SegmentLayout):
        heads = layer_set.layout.segment.model_units
    sharded = groups[layer_set.group].kind is GroupKind.SHARDED
    return cache_share_of(layer_set.layout, config, model_kv_heads=heads, group=layer_set.group, sharded=sharded)


def _same_rank(ticket: Ticket, rank: Rank) -> Address:
    """Return the address of the rank of the ticket's engine with the place of `rank`; else of its first rank."""
    lease = ticket.find(rank) or ticket.ranks[0]
    return Address(ticket.engine_id, Rank(ticket.dp_rank, lease.pp_rank, lease.tp_rank), lease.address)


def _pending_params(introduction: Ticket, request_id: str) -> bytes:
    """Return an encoded pending ticket of a request at the engine of `introduction`; empty if the ticket is too large.

    The reader waits no longer than for its own ticket.
    """
    params = msgspec.msgpack.encode(Ticket.rendezvous(introduction, request_id).to_params())
    return params if len(params) <= messages.REDIRECT_BYTES_MAX else b""


def _only_one(method: str, returned: Iterable[tuple[str, _BroughtT | None]]) -> _BroughtT | None:
    """Return the one object that a part has returned; None if none has. ConfigError if two parts have.

    `returned`: the name of each part, and what its method `method` has returned.
    """
    brought = [(name, value) for name, value in returned if value is not None]
    if len(brought) > 1:
        names = " and ".join(repr(name) for name, _ in brought)
        raise ConfigError(f"parts: {names} both bring {method}: expected at most one")
    return brought[0][1] if brought else None


def _first_few(requests: Sequence[str]) -> str:
    """Return a text for a log line: the first few of the request ids, and how many more there are."""
    more = f" and {len(requests) - _NAMED_MAX} more" if len(requests) > _NAMED_MAX else ""
    return f"{list(requests[:_NAMED_MAX])}{more}"


async def _wait_for_all(waits: Sequence[Coroutine[None, None, None]], timeout_s: float) -> bool:
    """Await all coroutines in `waits` together, for at most `timeout_s` seconds. Return whether all have ended."""
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*waits)
    except TimeoutError:
        return False
    return True
