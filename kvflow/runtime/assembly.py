"""Assembly of a registered KV cache: its parts are made here, once for each registration, and peers are answered."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kvflow import checks
from kvflow.checks import counted
from kvflow.config import Config, config_on
from kvflow.core.cache.groups import CacheGroup, LayerSet, layer_sets, sets_of
from kvflow.core.cache.regions import PooledSet, check_sets_apart, device_of, map_spans
from kvflow.core.cache.state import StatePart
from kvflow.core.cache.tensors import has_addresses
from kvflow.core.plan.topology import CacheShare, Rank, cache_share_of
from kvflow.core.policy.ledger import BlockLedger, GroupBlocks
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import UNKNOWN_ENGINE
from kvflow.core.protocol.claims import regions_to_wire
from kvflow.core.protocol.compatibility import compatibility_of
from kvflow.core.protocol.proof import HOST, SealTable
from kvflow.errors import ConfigError, RequestError, UsageError
from kvflow.logs import logger_of
from kvflow.parts import AskedParts, part
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.context import RankContext
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.foreign import foreign_of
from kvflow.runtime.load.gear import Gear, Poller, Words, reads_in_flight
from kvflow.runtime.load.leases import LeaseIdTelling, RemoteLeases
from kvflow.runtime.load.loader import Loader
from kvflow.runtime.load.straight import Straight
from kvflow.runtime.load.whole import Whole
from kvflow.runtime.memory import BlockCopier, HostBlocks, RankMemory
from kvflow.runtime.part import Part
from kvflow.runtime.peers.handshake import Handshakes
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.peers.reach import Reach
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.producer.blocks import OfferedBlocks
from kvflow.runtime.producer.farewells import Farewells
from kvflow.runtime.producer.serving import Serving
from kvflow.transport.base import MemoryUse, TransportError, is_staged

logger = logger_of(__name__)

_NAME_CHARS_SHOWN = 80
_USES = {
    "both": MemoryUse.SERVED | MemoryUse.READ_INTO,
    "producer": MemoryUse.SERVED,
    "consumer": MemoryUse.READ_INTO,
}
"""Uses of the cache's memory, by Config.role."""


class RegisteredCache:
    """Everything that exists once a cache is registered."""

    def __init__(
        self,
        context: RankContext,
        local: LocalRank,
        metadata: messages.Metadata,
        gear: Gear,
        memory: RankMemory,
        parts: Sequence[Part],
    ) -> None:
        """`metadata`: this rank as readers are told of it."""
        config, limits, staging = context.config, context.config.limits, memory.staging
        self.gear = gear
        self.memory = memory
        self.context = context
        self._answers = {kind: answer for part in parts for kind, answer in part.answers.items()}
        """Answers to the requests of parts: no other requests are decoded."""
        self.local = local
        self.metadata = metadata
        self.ledger = gear.ledger
        self.straight = Straight(config, staged=bool(staging))
        self.pools = [one.pool for one in staging]
        """Pools of host blocks and scratch buffers."""
        foreign = foreign_of(parts)
        telling = LeaseIdTelling(context, local)
        handshakes = Handshakes(context, local, telling)
        self.peers = Peers(context, foreign.handshakes(context, local, handshakes))
        self.asked = AskedParts(self)
        self.own_reach = Reach(context, local, self.peers)
        """The resolver of tickets of our own make; `resolver` may know others."""
        self.resolver = foreign.resolver(context, self.peers, self.own_reach)
        self.remote_leases = RemoteLeases(
            context, local, self.peers, self.own_reach, self.resolver, telling, self.asked
        )
        self.whole = Whole(
            context, local, self.peers, self.resolver, self.remote_leases, self.straight, gear, self.asked
        )
        self.loader = Loader(
            context, local, self.peers, self.resolver, self.remote_leases, gear, self.whole, self.asked
        )
        offered = OfferedBlocks(
            local.groups, gear.ledger, context.seals, staging, gear.copy_thread, limits.slice_bytes_max
        )
        self.serving = Serving(context, local, offered)
        self.strangers = foreign.service(context, local, metadata, self.serving)
        """The service that answers readers of another make."""
        self.readers = Farewells(context, local)
        self._config = context.config
        self._rank = context.identity.rank

    def answer(self, header: codec.Header, request: messages.Request, *, draining: bool) -> Answered:
        """Answer a peer, or promise to; never waits. A rank that drains connects readers of its open leases only."""
        ours = self.local.caller.target
        theirs = request.target
        if theirs.engine_id != ours.engine_id:
            asked_for = theirs.engine_id[:_NAME_CHARS_SHOWN]
            it_is = f"{UNKNOWN_ENGINE}: expected {asked_for!r}, this is {ours.engine_id!r}"
            if getattr(request, "reader", "") == self.local.reader:
                it_is += ", the reader itself: the address that it was given leads back to it"
            return msgspec.structs.replace(refusal(it_is), listens=ours)
        if header.fingerprint != self.local.compatibility.fingerprint():
            told = {"compatibility": self.local.compatibility, "cache_shares": self.local.cache_shares}
            return msgspec.structs.replace(refusal("the caches are not compatible"), **told)
        if theirs != ours:
            expected = Rank(theirs.dp_rank, theirs.pp_rank, theirs.tp_rank)
            return refusal(f"expected {expected}, this is {self._rank}")
        match request:
            case messages.ReleaseRequest():
                try:
                    return self.serving.release(request)
                except codec.WireError as error:
                    return refusal(str(error))
            case messages.DigestRequest():
                try:
                    promised: Answered = self.asked.get("verify", "a question for digests").answer(request)
                    return promised
                except RequestError as error:
                    return refusal(str(error))
            case messages.LeaseRequest():
                try:
                    return self.serving.news.answer(request)
                except codec.WireError as error:
                    return refusal(str(error))
            case messages.DeclineRequest():
                return self.serving.news.came_elsewhere(request)
            case messages.Goodbye():
                self.peers.said_goodbye(request)
                return messages.Ack(incarnation=self.metadata.incarnation)
            case messages.MetadataRequest():
                if draining and not self.serving.serves(request.request_id):
                    return refusal(f"engine {ours.engine_id!r} is draining", transient=True)
                if request.caller is not None:
                    self.readers.remember(request.caller)
                return self.metadata
            case _:
                return self._answers[type(request)](request)


async def register(
    context: RankContext,
    poller: Poller,
    copy_thread: CopyThread,
    groups: Sequence[CacheGroup],
    copy_blocks: BlockCopier | None,
    parts: Sequence[Part],
) -> RegisteredCache:
    """See `Runtime.register_kv_caches`."""
    config = context.config
    if copy_blocks is not None and not callable(copy_blocks):
        raise UsageError(f"copy_blocks: expected a function, got {checks.shown(copy_blocks)}")
    sets = layer_sets(groups, config.tp_size)
    where = device_of([layer for one in sets for layer in one.caches.items()])
    staged = is_staged(where.kind, config.staging, context.transport.reaches(where.kind))
    try:
        if not staged or all(has_addresses(one.caches) for one in sets):
            _check_apart(groups, sets)
        memory = await _prepared(config, copy_thread, groups, sets, staged, copy_blocks)
        context = replace(context, config=config_on(config, memory.filled.where.kind))
        gear = _gear(context, poller, copy_thread, memory, grows=config.limits.peer_in_flight_bytes_max == 0)
        registered = await _register(context, gear, memory, parts)
        if memory.filled.eager and registered.straight.scratch and config.role != "producer":
            await registered.asked.get("staging", "Config.scratch", ConfigError).prepare()
        if config.verify_share:  # now, not when the first load is drawn
            registered.asked.get("verify", "Config.verify_share", ConfigError)
    except (TransportError, RuntimeError) as error:
        layers = counted(sum(len(one.caches) for one in sets), "layer")
        raise ConfigError(f"cannot register {layers}: {error}") from error
    for group in groups:
        logger.info(
            "engine %r (%s): registered a KV cache of %s, %s of %s on %s%s%s",
            config.engine_id,
            context.identity.rank,
            counted(len(group.layers), "layer"),
            counted(group.num_blocks, "block"),
            counted(group.block_size_bytes, "byte"),
            f"{memory.device.where.kind}:{memory.device.where.number}",
            "" if len(groups) == 1 else f", group {group.name!r}",
            ", through host buffers" if memory.staging else "",
        )
    return registered


def _check_apart(groups: Sequence[CacheGroup], sets: Sequence[LayerSet]) -> None:
    """LayoutError if loads of different layers could write the same bytes."""
    pooled = ((groups[one.group], one.regions) for one in sets)
    check_sets_apart([PooledSet(group.name, str(group.pool), group.split, regions) for group, regions in pooled])


async def _prepared(
    config: Config,
    copy_thread: CopyThread,
    groups: Sequence[CacheGroup],
    sets: tuple[LayerSet, ...],
    staged: bool,
    copy_blocks: BlockCopier | None,
) -> RankMemory:
    """The memory that peers read: checked, or host blocks for it."""
    shown = sets
    staging: Sequence[HostBlocks] = ()
    where = device_of([layer for one in sets for layer in one.caches.items()])
    device = await copy_thread.device(where, engine_copies=staged and copy_blocks is not None)
    if staged:  # on the copy thread, since that touches all their pages
        what = f"a cache on {where.kind!r}, with Config.staging {config.staging!r},"
        host_buffers = part("staging", what, ConfigError).host_buffers
        made: list[HostBlocks] = []
        await copy_thread.run(lambda: made.extend(host_buffers(groups, config, copy_blocks, device)))
        staging = made
        shown = tuple(one for at, blocks in enumerate(made) for one in sets_of(at, blocks.layers, config.tp_size))
    elif not device.on_host:
        spans = map_spans([layer for one in sets for layer in one.caches.items()])
        await copy_thread.run(lambda: device.check(spans))
    return RankMemory(groups=groups, own=sets, device=device, staging=staging, shown=shown)


async def _register(
    context: RankContext,
    gear: Gear,
    memory: RankMemory,
    parts: Sequence[Part],
) -> RegisteredCache:
    config, transport, seals = context.config, context.transport, context.seals
    groups, sets = memory.groups, memory.shown
    regions = tuple(one.regions for one in sets)
    layers = [layer for one in sets for layer in one.caches.items()]
    await transport.register(map_spans(layers), regions[0].device, [groups, *layers], _USES[config.role])
    await transport.register([seals.span], HOST, seals, MemoryUse.SERVED)
    await transport.register([gear.words.span], HOST, gear.words, MemoryUse.READ_INTO)
    own = messages.Target(config.engine_id, *context.identity.rank)
    local = LocalRank(
        reader=context.identity.agent_name,
        caller=messages.Caller(target=own, address=context.identity.address),
        compatibility=compatibility_of([one.layout for one in sets], model=config.model),
        cache_shares=tuple(_share_of(config, groups, one) for one in sets),
        regions=regions,
        groups=tuple(group.facts for group in groups),
    )
    metadata = _metadata(context, local, seals, await transport.metadata(), staged=bool(memory.staging))
    return RegisteredCache(context, local, metadata, gear, memory, parts)


def _gear(context: RankContext, poller: Poller, copy_thread: CopyThread, memory: RankMemory, *, grows: bool) -> Gear:
    queue = reads_in_flight(context.config, grows=grows)
    return Gear(
        ledger=BlockLedger(
            [GroupBlocks(group.name, group.num_blocks, str(group.pool), group.split) for group in memory.groups]
        ),
        words=Words(context.config.limits.loads_max),
        queue=queue,
        poller=poller,
        copy_thread=copy_thread,
        clock=context.clock,
        reads_max=context.config.limits.slices_in_flight_max,
    )


def _share_of(config: Config, groups: Sequence[CacheGroup], one: LayerSet) -> CacheShare:
    said = groups[one.group].num_kv_heads
    heads = config.num_kv_heads if said is None else said
    if isinstance(one.layout, StatePart):
        heads = one.layout.segment.model_units
    return cache_share_of(one.layout, config, model_kv_heads=heads, group=one.group)


def _metadata(
    context: RankContext, local: LocalRank, seals: SealTable, agent_metadata: bytes, *, staged: bool
) -> messages.Metadata:
    config = context.config
    return messages.Metadata(
        engine_id=config.engine_id,
        incarnation=context.identity.incarnation,
        cache_shares=local.cache_shares,
        agent_metadata=agent_metadata,
        agent_metadata_crc32=zlib.crc32(agent_metadata),
        regions=tuple(map(regions_to_wire, local.regions)),
        groups=local.groups,
        seals=messages.SealLocation(address=seals.address(0), count=seals.count, hold_s=config.limits.seal_hold_s),
        staged=staged,
    )
