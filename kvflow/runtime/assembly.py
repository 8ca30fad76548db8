"""A registered KV cache: all objects that are made when it is registered, and the answers to peers."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from kvflow import checks
from kvflow.checks import counted, error_text
from kvflow.config import Config, config_for_device
from kvflow.core.cache.groups import CacheGroup, LayerSet, check_sets_disjoint, layer_sets, named_layers, sets_of
from kvflow.core.cache.regions import Device, device_of, map_spans
from kvflow.core.cache.state import StatePart
from kvflow.core.cache.tensors import TensorAddresses, has_addresses
from kvflow.core.plan.topology import CacheShare, cache_share_of, check_heads
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import UNKNOWN_ENGINE, Address
from kvflow.core.protocol.claims import regions_to_wire
from kvflow.core.protocol.compatibility import compatibility_of
from kvflow.core.protocol.proof import HOST
from kvflow.errors import ConfigError, InvalidInput, KVFlowError, RequestError, UsageError
from kvflow.logs import logger_of
from kvflow.parts import PARTS, import_part
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.load.flight_resources import FlightResources, LoadThrottle, SealSlots, read_permit_queue
from kvflow.runtime.load.leases import LeaseIdNotifier, RemoteLeases
from kvflow.runtime.load.loader import Loader
from kvflow.runtime.memory import BlockCopier, HostBlocks, RankMemory
from kvflow.runtime.part import Ending, Part, stock_part_of
from kvflow.runtime.peers.handshake import Agents, Handshakes
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.peers.ticket_resolver import TicketResolver
from kvflow.runtime.producer.goodbyes import Goodbyes
from kvflow.runtime.producer.serving import Serving
from kvflow.runtime.statistics import PartStatistics
from kvflow.transport.base import MemoryUse, TransportError, is_staged

if TYPE_CHECKING:
    from kvflow.runtime.registration import Registration
    from kvflow.runtime.supervisor import Supervisor

logger = logger_of(__name__)

_NAME_CHARS_SHOWN = 80
_RELEASE_SLACK_S = 1.0  # a part that takes all of its time has still to say so
_NAMED_MAX = 5
_USES = {
    "both": MemoryUse.SERVED | MemoryUse.READ_INTO,
    "producer": MemoryUse.SERVED,
    "consumer": MemoryUse.READ_INTO,
}
"""How the cache's memory is registered with the transport, by Config.role."""


class RegisteredCache:
    """The registered cache of a rank, and all objects of the rank that exist only while the cache is registered."""

    def __init__(
        self,
        runtime: Supervisor,
        registration: Registration,
        config: Config,
        memory: RankMemory,
        resources: FlightResources,
        local: LocalRank,
        metadata: messages.Metadata,
    ) -> None:
        """Make every object that exists as long as the cache is registered.

        `config` has the limits for the cache's kind of device. `local` describes this rank for comparison with peers,
        `metadata` describes it to readers.
        """
        self.config = config
        self.rank = runtime.rank
        self.incarnation = registration.incarnation
        self.host, self.port = runtime.host, runtime.listener.port
        self.clock = runtime.clock
        self.spawn = registration.spawn
        self.observers = runtime.observers
        self.transport = registration.transport
        self.side_channel = runtime.side_channel
        self.seals = runtime.seals
        self.token_hex = runtime.world.token_hex
        self.resources = resources
        self.memory = memory
        self._parts: dict[str, Any] = {}
        """Optional features (`parts.PARTS`) that this cache has used, by folder name."""
        self.local = local
        self.metadata = metadata
        self.ledger = resources.ledger
        self.scratch = config.scratch == "always" or (config.scratch == "auto" and "staging" in PARTS)
        """True if loads may read small chunks into scratch memory first, and then copy them into the cache."""
        self.throttle = LoadThrottle(resources.poller)
        self.pools = [one.pool for one in memory.staging]
        """The pool of host blocks of each group and, once scratch memory is in use, the pool of scratch buffers."""
        stock = stock_part_of(runtime.parts)
        self.lease_notifier = LeaseIdNotifier(self)
        self.agents = Agents(self)
        self.peers = Peers(self, stock.handshakes(self, Handshakes(self, self.lease_notifier)))
        self.kvflow_resolver = TicketResolver(self)
        """The resolver of kvflow tickets. `resolver` may also resolve tickets of stock peers (vLLM's NixlConnector)."""
        self.resolver = stock.resolver(self)
        self.remote_leases = RemoteLeases(self)
        self.loader = Loader(self)
        self.serving = Serving(self)
        self.stock_service = stock.service(self)
        """The service that answers stock readers (vLLM's own NixlConnector); None if they are not served."""
        self.goodbyes = Goodbyes(self)
        self.begun_parts: list[Part] = []
        """The runtime's parts (optional features) that use this cache: `Part.registered` has returned for each.

        When the cache ends, only these parts are ended: a part that refused the cache may belong to another runtime.
        """
        self._part_problems: dict[tuple[str, str], str] = {}
        """The first error of each method of a part that is called at its end, as text, by the part's and its name."""
        self._answers: dict[type[Any], Callable[[Any], Answered]] = {
            messages.ReleaseRequest: self.serving.release,
            messages.DigestRequest: lambda question: self.part("verify", "a question for digests").answer(question),
            messages.LeaseRequest: self.serving.lease_answers.answer,
            messages.DeclineRequest: self.serving.lease_answers.redirect,
            messages.Goodbye: self._on_goodbye,
        }
        for one in runtime.parts:
            self._answers.update(one.answers)

    def part(self, name: str, what: str, kind: type[KVFlowError] = RequestError) -> Any:
        """Return the object of an optional feature for this cache. The first call makes the object.

        `name`: folder of the feature, such as "staging", a key of `parts.PARTS`. If it is not installed, raise `kind`.
        `what`: the call that needs the feature, for the error.
        """
        made = self._parts.get(name)
        if made is None:
            made = self._parts[name] = import_part(name, what, kind).begin(self)
        return made

    def answer(self, header: codec.Header, request: messages.Request, *, draining: bool) -> Answered:
        """Return the answer to a peer's request, or a future of the answer.

        Refuses a request for another engine or rank, and a request from a peer with an incompatible cache, which
        `header` shows. If `draining`, only readers of a request with an open lease get this rank's metadata.
        """
        ours = self.local.caller
        theirs = request.target
        if theirs.engine_id != ours.engine_id:
            asked_for = theirs.engine_id[:_NAME_CHARS_SHOWN]
            it_is = f"{UNKNOWN_ENGINE}: expected {asked_for!r}, this is {ours.engine_id!r}"
            if getattr(request, "reader", "") == self.local.reader:
                it_is += ", the reader itself: the peer's address leads back to it"
            return msgspec.structs.replace(refusal(it_is), listens=ours)
        if header.fingerprint != self.local.compatibility.fingerprint():
            own_facts = {"compatibility": self.local.compatibility, "cache_shares": self.local.cache_shares}
            return msgspec.structs.replace(refusal("the caches are not compatible"), **own_facts)
        if theirs.rank != ours.rank:
            return refusal(f"expected {theirs.rank}, this is {self.rank}")
        if isinstance(request, messages.MetadataRequest):
            if draining and not self.serving.has_open_lease(request.request_id):
                return refusal(f"engine {ours.engine_id!r} is draining", transient=True)
            if request.caller is not None:
                self.goodbyes.remember(request.caller)
            return self.metadata
        try:
            return self._answers[type(request)](request)
        except (codec.WireError, InvalidInput) as error:
            return refusal(str(error))

    def _on_goodbye(self, goodbye: messages.Goodbye) -> messages.Ack:
        self.peers.on_goodbye(goodbye)
        return messages.Ack(incarnation=self.incarnation)

    async def begin_parts(self, runtime: Supervisor) -> None:
        """Call `registered` of each part (optional feature) of the runtime, in order, with this cache."""
        for one in runtime.parts:
            await one.registered(runtime, self)
            self.begun_parts.append(one)

    @property
    def busy(self) -> bool:
        """True if a lease or load is open, a part (optional feature) has work under way, or blocks are quarantined."""
        loading = self.loader.statistics
        open_now = self.serving.statistics.open_leases or loading.open_loads or loading.quarantines
        return bool(open_now or any(now.open_requests for now in self.part_statistics().values()))

    def part_statistics(self) -> dict[str, PartStatistics]:
        """Return the counts of the begun parts (optional features) that have counts, by name."""
        found = {}
        for one in self.begun_parts:
            with self._noting_errors(one, "statistics"):
                if (now := one.statistics) is not None:
                    found[one.name] = now
        return found

    @contextmanager
    def _noting_errors(self, one: Part, method: str) -> Iterator[None]:
        """Note an error that a part raises, so that all others are ended all the same. `release_parts` returns it."""
        try:
            yield
        except Exception as error:
            if (one.name, method) not in self._part_problems:
                logger.exception("engine %r: part %s: %s failed", self.config.engine_id, one.name, method)
                why = f"{type(error).__name__}: {error_text(error) or 'not done in time'}"
                self._part_problems[one.name, method] = f"{method} of part {one.name!r}: {why}"

    async def drain(self, deadline_s: float) -> bool:
        """Wait up to `deadline_s` seconds until all leases, loads and work of parts (optional features) have ended.

        Refuse readers' questions that wait for a lease. After the deadline, end the remaining work and wait for its
        end. Return whether everything ended within `deadline_s`. Cancelling stops the waiting.
        """
        serving, loader, engine_id = self.serving, self.loader, self.config.engine_id
        serving.lease_answers.refuse_questions(f"engine {engine_id!r} is draining")
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
        for one in self.begun_parts:
            with self._noting_errors(one, "end"):
                one.end(why, wait_s)

    async def _parts_drained(self) -> None:
        """Wait until no begun part (optional feature) has work under way."""
        for one in self.begun_parts:
            with self._noting_errors(one, "drained"):
                await one.drained()

    async def release_parts(self, timeout_s: float) -> str:
        """Call `release` of all begun parts, in order, each for about `timeout_s` at most.

        Return "" if all have released the cache, and none has raised an error since it began. Otherwise return why not.
        """
        problems = []
        for one in self.begun_parts:
            with self._noting_errors(one, "release"):
                async with asyncio.timeout(timeout_s + _RELEASE_SLACK_S):
                    problems.append(await one.release(timeout_s))
        problems += [why for (_, method), why in self._part_problems.items() if method != "statistics"]
        return "; ".join(filter(None, problems))

    async def end(self, *, broken: bool = False) -> None:
        """Call `stop`, and wait until leases, loads and the work of parts have ended, at most Config.ending_s.

        If `broken`, do not wait for loads: it may never be known when their reads end.
        """
        self.stop(Ending.CLOSED)
        serving, loader, bound_s = self.serving, self.loader, self.config.ending_s
        waits = [serving.drained()] if broken else [serving.drained(), loader.drained()]
        waits.append(self._parts_drained())
        if not await _wait_for_all(waits, bound_s):
            loads = counted(len(loader.quarantines), "load")
            what = f"bytes may still land of {loads}, leases of {_first_few(serving.open_requests)}"
            logger.warning("engine %r: still open after another %s s: %s", self.config.engine_id, bound_s, what)

    async def wait_for_copies(self) -> str:
        """Wait until no copy between the cache and buffers runs, at most Limits.transport_close_timeout_s.

        Return "" if nothing uses the cache now, else a text for an error that says what still uses it.
        """
        bound_s = self.config.limits.transport_close_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                with suppress(ConfigError):  # no thread could be started, so no copy runs
                    await self.resources.copy_thread.run(lambda: None)  # jobs run one after another
        except TimeoutError:
            return f"a copy still runs after {bound_s} s"
        loads, leases = self.loader.open_requests, self.serving.open_requests
        parts = {name: now.open_requests for name, now in self.part_statistics().items() if now.open_requests}
        if not (loads or leases or parts):
            return ""
        return f"bytes of loads {loads} may still land, leases {leases} hold their blocks, requests of parts: {parts}"


async def register(
    runtime: Supervisor, registration: Registration, groups: Sequence[CacheGroup], copy_blocks: BlockCopier | None
) -> RegisteredCache:
    """Check the layers of `groups`, register their memory with the transport, and return the registered cache.

    `copy_blocks`: the engine's function for copies between host blocks and the cache; None for kvflow's own. UsageError
    if it is not callable, LayoutError if layers do not fit together, ConfigError if the memory cannot be registered.
    """
    config, transport = runtime.config, registration.transport
    if copy_blocks is not None and not callable(copy_blocks):
        raise UsageError(f"copy_blocks: expected a function, got {checks.short_repr(copy_blocks)}")
    sets = layer_sets(groups, config.tp_size)
    where = device_of(named_layers(sets))
    staged = is_staged(where.kind, config.staging, transport.reaches(where.kind))
    try:
        if not staged or all(has_addresses(one.caches) for one in sets):
            check_sets_disjoint([(groups[one.group], one.regions) for one in sets])
        memory = await _prepare_memory(config, runtime.copy_thread, groups, sets, where, staged, copy_blocks)
        registered = await _register(runtime, registration, memory)
        if memory.target_device.allocates_at_registration and registered.scratch and config.role != "producer":
            await registered.part("staging", "Config.scratch", ConfigError).prepare()
        if config.verify_share:  # now, not when the first load is to be verified
            registered.part("verify", "Config.verify_share", ConfigError)
    except (TransportError, RuntimeError) as error:
        layers = counted(sum(len(one.caches) for one in sets), "layer")
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
        what = f"a cache on {where.kind!r}, with Config.staging {config.staging!r},"
        host_buffers = import_part("staging", what, ConfigError).host_buffers
        staging = await copy_thread.run(lambda: host_buffers(groups, config, copy_blocks, device))
        served = tuple(one for at, blocks in enumerate(staging) for one in sets_of(at, blocks.layers, config.tp_size))
    elif not device.on_host:
        spans = map_spans(named_layers(sets))
        await copy_thread.run(lambda: device.check(spans))
    addresses = TensorAddresses(named_layers((*sets, *served)))
    return RankMemory(
        groups=groups, own_layers=sets, device=device, staging=staging, served_layers=served, addresses=addresses
    )


async def _register(runtime: Supervisor, registration: Registration, memory: RankMemory) -> RegisteredCache:
    """Register `memory`, and the memory of seals, with the transport. Return the registered cache."""
    transport, seals, groups, sets = registration.transport, runtime.seals, memory.groups, memory.served_layers
    config = config_for_device(runtime.config, memory.target_device.where.kind)
    shares = tuple(_cache_share(config, groups, one) for one in sets)
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
    regions = tuple(one.regions for one in sets)
    layers = named_layers(sets)
    await transport.register(map_spans(layers), regions[0].device, [groups, *layers], _USES[config.role])
    await transport.register([seals.span], HOST, seals, MemoryUse.SERVED)
    await transport.register([resources.seal_slots.table.span], HOST, resources.seal_slots, MemoryUse.READ_INTO)
    local = LocalRank(
        reader=registration.agent_name,
        caller=Address(config.engine_id, runtime.rank, runtime.address),
        compatibility=compatibility_of([one.layout for one in sets], model=config.model),
        cache_shares=shares,
        regions=regions,
        groups=tuple(group.facts for group in groups),
    )
    agent_metadata = await transport.metadata()
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
    )
    return RegisteredCache(runtime, registration, config, memory, resources, local, metadata)


def _cache_share(config: Config, groups: Sequence[CacheGroup], one: LayerSet) -> CacheShare:
    said = groups[one.group].num_kv_heads
    heads = config.num_kv_heads if said is None else said
    if isinstance(one.layout, StatePart):
        heads = one.layout.segment.model_units
    return cache_share_of(one.layout, config, model_kv_heads=heads, group=one.group)


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
