"""What exists once a KV cache is registered: the parts that serve, load and know peers, and what peers are answered.

Registering happens once; nothing here changes afterwards but the parts themselves.
"""

from __future__ import annotations

import logging

import msgspec

from kvflow import checks
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import Regions, map_regions, map_spans
from kvflow.core.cache.tensors import KVCaches, checked_caches
from kvflow.core.plan.topology import Rank, cache_share_of
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
from kvflow.runtime.producer.blocks import OfferedBlocks
from kvflow.runtime.producer.farewells import Farewells
from kvflow.runtime.producer.serving import Serving
from kvflow.transport.base import TransportError, is_staged

logger = logging.getLogger(__name__)

_NAME_CHARS_SHOWN = 80


class RegisteredCache:
    """Everything that exists once a cache is registered."""

    def __init__(
        self,
        context: RankContext,
        local: LocalRank,
        metadata: messages.Metadata,
        gear: Gear,
        route: Route,
        offered: OfferedBlocks,
    ) -> None:
        """`metadata`: what readers are told of this rank, but for what its clock shows then."""
        self.local = local
        self.metadata = metadata
        self.ledger = gear.ledger
        self.route = route
        self.peers = Peers(context, Handshakes(context, local))
        self.reach = Reach(context, local, self.peers)
        self.remote_leases = RemoteLeases(context, local, self.peers, self.reach)
        self.loader = Loader(context, local, self.reach, self.remote_leases, route, gear)
        self.serving = Serving(context, local.cache_share, offered)
        self.readers = Farewells(context, local)
        self._rank = context.identity.rank
        self._clock = context.clock

    def answer(self, header: messages.Header, request: messages.Request, *, draining: bool) -> messages.Reply:
        """Answer a peer; never waits. A rank that drains connects readers of its open leases only."""
        ours, theirs = self.local.caller.target, request.target
        if theirs.engine_id != ours.engine_id:
            asked_for = theirs.engine_id[:_NAME_CHARS_SHOWN]
            return refusal(f"unknown engine: expected {asked_for!r}, this is {ours.engine_id!r}")
        if header.fingerprint != self.local.compatibility.fingerprint():
            return refusal("the caches are not compatible", local=self.local)
        if theirs != ours:
            expected = Rank(theirs.dp_rank, theirs.pp_rank, theirs.tp_rank)
            return refusal(f"expected {expected}, this is {self._rank}")
        match request:
            case messages.LeaseRequest():
                return self.serving.find(request)
            case messages.ReleaseRequest():
                try:
                    return self.serving.release(request)
                except messages.WireError as error:
                    return refusal(str(error))
            case messages.ClockRequest():
                return messages.ClockShown(incarnation=self.metadata.incarnation, clock_s=self._clock.now_s())
            case messages.Goodbye():
                self.peers.said_goodbye(request)
                return messages.Ack()
            case messages.MetadataRequest():
                if draining and not self.serving.serves(request.request_id):
                    return refusal(f"engine {ours.engine_id!r} is draining", transient=True)
                if request.caller is not None:
                    self.readers.remember(request.caller)
                return msgspec.structs.replace(self.metadata, clock_s=self._clock.now_s())


def refusal(reason: str, *, local: LocalRank | None = None, transient: bool = False) -> messages.Refusal:
    """A "no"; with what we are, if that is the reason."""
    return messages.Refusal(
        reason=reason,
        version=messages.PROTOCOL_VERSION,
        transient=transient,
        compatibility=local.compatibility if local else None,
        cache_share=local.cache_share if local else None,
    )


async def register(
    context: RankContext,
    poller: Poller,
    copy_thread: CopyThread,
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
    device = map_regions(layout, kv_caches).device
    staging: list[HostBuffers] = []
    try:
        if is_staged(device.kind, config.staging):  # on the copy thread, since that touches all their pages
            await copy_thread.run(lambda: staging.append(HostBuffers(kv_caches, layout, config, copy_blocks)))
        host_buffers = staging[0] if staging else None
        registered = await _register(context, poller, copy_thread, kv_caches, layout, host_buffers)
    except TransportError as error:
        raise ConfigError(f"cannot register {len(layout.layer_names)} layers: {error}") from error
    logger.info(
        "engine %r (%s): registered a KV cache of %s layers, %s blocks of %s bytes on %s%s",
        config.engine_id,
        context.identity.rank,
        len(layout.layer_names),
        layout.num_blocks,
        layout.block_size_bytes,
        f"{device.kind}:{device.number}",
        ", through host buffers" if staging else "",
    )
    return registered


async def _register(
    context: RankContext,
    poller: Poller,
    copy_thread: CopyThread,
    kv_caches: KVCaches,
    layout: CacheLayout,
    staging: HostBuffers | None,
) -> RegisteredCache:
    config, limits, transport = context.config, context.config.limits, context.transport
    seals, fetched = SealTable(limits.leases_max), SealTable(limits.loads_max)
    caches = kv_caches if staging is None else staging.caches
    regions = map_regions(layout, kv_caches) if staging is None else staging.regions
    await transport.register(map_spans(caches), regions.device, [kv_caches, *caches.values()])
    await transport.register([seals.span, fetched.span], HOST, (seals, fetched))
    metadata = _metadata(context, layout, regions, seals, await transport.metadata(), staged=staging is not None)
    own = messages.Target(config.engine_id, *context.identity.rank)
    local = LocalRank(
        reader=context.identity.agent_name,
        caller=messages.Caller(target=own, address=context.identity.address),
        compatibility=messages.compatibility_of(layout, model=config.model),
        cache_share=metadata.cache_share,
        regions=regions,
    )
    gear = Gear(
        ledger=BlockLedger(layout.num_blocks),
        seals=fetched,
        queue=reads_in_flight(config),
        poller=poller,
        copy_thread=copy_thread,
        clock=context.clock,
        reads_max=limits.slices_in_flight_max,
    )
    scratch = Scratch(transport, regions.device, limits.scratch_slot_bytes_max, limits.scratch_slots_max)
    route = Route(config, kv_caches, layout, scratch, staging, copy_thread)
    offered = OfferedBlocks(layout, gear.ledger, seals, staging, copy_thread, limits.slice_bytes_max)
    return RegisteredCache(context, local, metadata, gear, route, offered)


def _metadata(
    context: RankContext,
    layout: CacheLayout,
    regions: Regions,
    seals: SealTable,
    agent_metadata: bytes,
    *,
    staged: bool,
) -> messages.Metadata:
    config = context.config
    return messages.Metadata(
        engine_id=config.engine_id,
        incarnation=context.identity.incarnation,
        clock_s=0.0,
        cache_share=cache_share_of(
            layout,
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            model_kv_heads=config.num_kv_heads,
        ),
        agent_metadata=agent_metadata,
        agent_metadata_crc32=messages.checksum(agent_metadata),
        regions=messages.regions_to_wire(regions),
        seals=messages.SealLocation(address=seals.address(0), count=seals.count, hold_s=config.limits.seal_hold_s),
        staged=staged,
    )
