"""What exists once a KV cache is registered: the parts that serve, load and know peers, built together.

Registering happens once; nothing here changes afterwards but the parts themselves.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from kvflow import checks
from kvflow.config import Config
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import Regions, map_regions, map_spans
from kvflow.core.cache.tensors import KVCaches, checked_caches
from kvflow.core.plan.topology import CacheShare, cache_share_of
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.protocol import messages
from kvflow.core.protocol.freshness import HOST, SealTable
from kvflow.errors import ConfigError, LayoutError, UsageError
from kvflow.runtime.consumer.flight import Gear, Poller
from kvflow.runtime.consumer.loader import Loader, reads_in_flight
from kvflow.runtime.consumer.remote_leases import RemoteLeases
from kvflow.runtime.context import RankContext
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.memory.host_buffers import BlockCopier, HostBuffers
from kvflow.runtime.memory.route import Route
from kvflow.runtime.memory.scratch import Scratch
from kvflow.runtime.peers.handshake import Handshakes
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.peers.reach import Reach
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.producer.answers import Answers
from kvflow.runtime.producer.blocks import OfferedBlocks
from kvflow.runtime.producer.farewells import Farewells
from kvflow.runtime.producer.serving import Serving
from kvflow.transport.base import TransportError, is_staged

logger = logging.getLogger(__name__)


class Movers(NamedTuple):
    """What moves bytes for the loads and leases of a rank."""

    poller: Poller
    copy_thread: CopyThread


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredCache:
    """Everything that exists once a cache is registered."""

    local: LocalRank
    ledger: BlockLedger
    serving: Serving
    loader: Loader
    remote_leases: RemoteLeases
    reach: Reach
    peers: Peers
    readers: Farewells
    staging: HostBuffers | None
    scratch: Scratch
    metadata: messages.Metadata
    """What readers are told of this rank, but for what its clock shows then."""
    answers: Answers

    @property
    def buffers_used(self) -> int:
        return self.scratch.used + (self.staging.pool.used if self.staging else 0)


async def register(
    context: RankContext,
    movers: Movers,
    kv_caches: KVCaches,
    layout: CacheLayout,
    copy_blocks: BlockCopier | None,
) -> RegisteredCache:
    """See `Runtime.register_kv_caches`."""
    config = context.config
    checks.instance(layout, CacheLayout, "layout", error=LayoutError)
    if copy_blocks is not None and not callable(copy_blocks):
        raise UsageError(f"copy_blocks: expected a function, got {checks.shown(copy_blocks)}")
    kv_caches = checked_caches(kv_caches)
    regions = map_regions(layout, kv_caches)
    staged = is_staged(regions.device.kind, config.staging)
    try:
        staging = await _stage(context, movers, kv_caches, layout, copy_blocks) if staged else None
        registered = await _register(context, movers, kv_caches, layout, regions, staging)
    except TransportError as error:
        raise ConfigError(f"cannot register {len(layout.layer_names)} layers: {error}") from error
    logger.info(
        "engine %r (%s): registered a KV cache of %s layers, %s blocks of %s bytes on %s%s",
        config.engine_id,
        context.identity.rank,
        len(layout.layer_names),
        layout.num_blocks,
        layout.block_size_bytes,
        f"{regions.device.kind}:{regions.device.number}",
        ", through host buffers" if staged else "",
    )
    return registered


async def _stage(
    context: RankContext, movers: Movers, kv_caches: KVCaches, layout: CacheLayout, copy_blocks: BlockCopier | None
) -> HostBuffers:
    """Make the host buffers; on the copy thread, since that touches all their pages."""
    made: list[HostBuffers] = []
    await movers.copy_thread.run(lambda: made.append(HostBuffers(kv_caches, layout, context.config, copy_blocks)))
    return made[0]


async def _register(
    context: RankContext,
    movers: Movers,
    kv_caches: KVCaches,
    layout: CacheLayout,
    regions: Regions,
    staging: HostBuffers | None,
) -> RegisteredCache:
    config, transport = context.config, context.transport
    seals, fetched = SealTable(config.limits.leases_max), SealTable(config.limits.loads_max)
    caches = kv_caches if staging is None else staging.caches
    regions = regions if staging is None else staging.regions
    await transport.register(map_spans(caches), regions.device, [kv_caches, *caches.values()])
    await transport.register([seals.span, fetched.span], HOST, (seals, fetched))
    agent_metadata = await transport.metadata()
    cache_share = _cache_share(config, layout)
    local = _local_rank(context, layout, cache_share, regions)
    ledger = BlockLedger(layout.num_blocks)
    scratch = Scratch(
        transport,
        regions.device,
        slot_bytes=config.limits.scratch_slot_bytes_max,
        slots=config.limits.scratch_slots_max,
    )
    route = Route(config, kv_caches, layout, scratch, staging, movers.copy_thread)
    gear = Gear(
        ledger=ledger,
        seals=fetched,
        queue=reads_in_flight(config),
        poller=movers.poller,
        copy_thread=movers.copy_thread,
        clock=context.clock,
        reads_max=config.limits.slices_in_flight_max,
    )
    peers = Peers(context, Handshakes(context, local))
    reach = Reach(context, local, peers)
    remote_leases = RemoteLeases(context, local, peers, reach)
    offered = OfferedBlocks(layout, ledger, seals, staging, movers.copy_thread, config.limits.slice_bytes_max)
    serving = Serving(context, cache_share, offered)
    readers = Farewells(context, local)
    metadata = _metadata(context, local, agent_metadata, seals, staged=staging is not None)
    return RegisteredCache(
        local=local,
        ledger=ledger,
        serving=serving,
        loader=Loader(context, local, reach, remote_leases, route, gear),
        remote_leases=remote_leases,
        reach=reach,
        peers=peers,
        readers=readers,
        staging=staging,
        scratch=scratch,
        metadata=metadata,
        answers=Answers(context.clock, local, metadata, serving, peers, readers),
    )


def _cache_share(config: Config, layout: CacheLayout) -> CacheShare:
    return cache_share_of(
        layout,
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        model_kv_heads=config.num_kv_heads,
    )


def _local_rank(context: RankContext, layout: CacheLayout, cache_share: CacheShare, regions: Regions) -> LocalRank:
    config, rank = context.config, context.identity.rank
    return LocalRank(
        reader=context.identity.agent_name,
        caller=messages.Caller(
            target=messages.Target(config.engine_id, rank.dp, rank.pp, rank.tp),
            address=context.identity.address,
        ),
        compatibility=messages.compatibility_of(layout, model=config.model),
        cache_share=cache_share,
        regions=regions,
    )


def _metadata(
    context: RankContext, local: LocalRank, agent_metadata: bytes, seals: SealTable, *, staged: bool
) -> messages.Metadata:
    return messages.Metadata(
        engine_id=context.config.engine_id,
        incarnation=context.identity.incarnation,
        clock_s=0.0,
        cache_share=local.cache_share,
        agent_metadata=agent_metadata,
        agent_metadata_crc32=messages.checksum(agent_metadata),
        regions=messages.regions_to_wire(local.regions),
        seals=messages.SealLocation(
            address=seals.address(0), count=seals.count, hold_s=context.config.limits.seal_hold_s
        ),
        staged=staged,
    )
