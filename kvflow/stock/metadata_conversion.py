"""Conversion between the metadata of stock ranks and of kvflow ranks: layers, blocks, heads, memory.

A stock rank's metadata has the bytes of a block, but not the number of heads, which follows from this rank's cache of
the same model. If layers of several groups share a region of memory, the metadata names only the first layer. vLLM lays
out the same model alike everywhere, so this rank's cache shows which layers share a region, provided that regions,
names and groups of both ranks agree.

Nor does the metadata have the number of the engine's ranks. The parameters have it, but they are not signed, and a
stock listener expects questions about its engine's ranks only. So the number is trusted only if the heads of the
engine's first rank prove it, or if it is configured (`StockPeers.tp_sizes`).
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from kvflow.checks import counted, first_few
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Device, Regions
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER, NAMED_LAYERS_MAX
from kvflow.core.plan.topology import CacheShare
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.messages import RegionTable, SealLocation
from kvflow.errors import ConfigError, PeerIncompatible
from kvflow.limits import SEAL_HOLD_S_MAX
from kvflow.stock.wire import StockMetadata

HEADS_FIRST = ("LBHNC", "HND")
TOKENS_FIRST = ("LBNHC", "NHD")
SEVERAL_GROUPS = -1
"""`OurRegion.group` of a region with layers of several groups."""
_LAYOUTS = (*HEADS_FIRST, *TOKENS_FIRST)
_MEMORY = {"DRAM": "cpu", "VRAM": "cuda"}
_NUMBER = re.compile(r"\d+")
_NO_SEALS = SealLocation(address=1, count=1, hold_s=SEAL_HOLD_S_MAX)


class OurLayers(NamedTuple):
    """A layer set: layers of this rank with equal memory layouts. `share` describes them, `regions` is their memory."""

    share: CacheShare
    regions: Regions

    @property
    def head_bytes(self) -> int:
        """Bytes of one head for one token, K and V together."""
        return self.regions.block.run * len(self.regions.planes)

    @property
    def model_kv_heads(self) -> int:
        """Number of KV heads in the whole model; 0 if this rank does not know it."""
        if self.share.latent:
            return 1
        return self.share.model_kv_heads or (self.share.kv_heads if self.share.tp_size == 1 else 0)


class OurRegion(NamedTuple):
    """A region of this rank's memory, as vLLM's metadata lists regions.

    It holds one layer, or one layer of each of several groups, which share it.
    """

    layer: int
    """Number of the region's first layer, unique in this cache. The region is named by that layer."""
    set_and_index: tuple[int, int]
    """Position of the region's first layer: the index of its layer set in `OurCache.layer_sets`, and its index in the
    set."""
    group: int
    """Index of the group of all layers in the region; SEVERAL_GROUPS if their groups differ."""

    @property
    def number(self) -> int:
        """Number in the name of the region's first layer: 3 for "model.layers.3". A draft model counts from 0 again."""
        return self.layer % NAMED_LAYERS_MAX


class OurCache(NamedTuple):
    """This rank's cache, described for comparison with a stock rank's metadata."""

    layer_sets: tuple[OurLayers, ...]
    groups: tuple[GroupFacts, ...]

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(layer for one in self.layer_sets for layer in one.share.layers)

    @property
    def regions(self) -> tuple[OurRegion, ...]:
        """This rank's regions, in the order in which a stock rank lists its own.

        They are ordered by the number in the first layer's name. The regions of a draft model come last.
        """
        found: dict[int, OurRegion] = {}
        for layer, which, nth in sorted(self._layers(), key=_stock_order):
            group, base = self.layer_sets[which].share.group, self.base_of(which, nth)
            known = found.setdefault(base, OurRegion(layer, (which, nth), group))
            if known.group != group:
                found[base] = known._replace(group=SEVERAL_GROUPS)
        return tuple(found.values())

    def base_of(self, which: int, nth: int) -> int:
        """Return the address of the first block of the layer with index `nth` in `layer_sets[which]`."""
        regions = self.layer_sets[which].regions
        return int(regions.bases[nth * len(regions.planes)])

    def _layers(self) -> list[tuple[int, int, int]]:
        sets = enumerate(self.layer_sets)
        return [(layer, which, nth) for which, one in sets for nth, layer in enumerate(one.share.layers)]


def _stock_order(layer: tuple[int, int, int]) -> tuple[bool, int, int]:
    return layer[0] >= FIRST_DRAFT_LAYER, layer[0] % NAMED_LAYERS_MAX, layer[0]


def our_cache(shares: Sequence[CacheShare], regions: Sequence[Regions], groups: Sequence[GroupFacts]) -> OurCache:
    """Return an OurCache that describes this rank's cache.

    `shares` and `regions` have one item for each layer set, `groups` has one for each group of layers. ConfigError if
    blocks of this cache cannot be exchanged with stock engines.
    """
    what = "stock peers: our cache"
    if any(share.part for share in shares) or any(group.kind is GroupKind.STATE for group in groups):
        raise ConfigError(f"{what}: state per request is not exchanged with stock engines, only attention is")
    if len(sizes := {group.block_size for group in groups}) > 1:
        raise ConfigError(f"{what}: groups have block sizes {sorted(sizes)}, a stock engine has only one")
    if any(map(_packs_layers, regions)):
        packed = "a block's row holds several layers (vLLM's packed layouts, such as BLHNC)"
        advice = "set VLLM_KV_CACHE_LAYOUT=LBHNC, if the model can have it"
        raise ConfigError(f"{what}: {packed}, which are not exchanged with stock engines: {advice}")
    if shares[0].pp_size != 1:
        raise ConfigError(f"{what}: pp_size {shares[0].pp_size}: only 1 is exchanged with stock engines")
    return OurCache(tuple(map(OurLayers, shares, regions)), tuple(groups))


def _packs_layers(regions: Regions) -> bool:
    """Return True if blocks of other layers lie between two blocks of a layer."""
    bases = sorted(map(int, regions.bases[:: len(regions.planes)]))
    return any(0 < above - base < int(regions.strides[0]) for base, above in itertools.pairwise(bases))


def metadata_of(
    at: Address, stock: StockMetadata, incarnation: str, ours: OurCache, *, tp_size: int
) -> messages.Metadata:
    """Return a stock rank's metadata as kvflow's own message, to be checked like any peer's metadata.

    `at` is the stock rank's address, `incarnation` the name of its cache's registration, and `tp_size` the number of
    its engine's ranks. PeerIncompatible if this rank cannot read the stock rank's cache.
    """
    if problems := reasons_not_read(stock):
        raise at.failure(PeerIncompatible, "; ".join(problems))
    place_of, device = _region_indexes(at, stock, ours), _device(at, stock, ours)
    num_blocks, strides = _num_blocks(at, stock), stock.block_strides or stock.block_lens
    shares: list[CacheShare] = []
    tables: list[RegionTable] = []
    for which, one in enumerate(ours.layer_sets):
        places = [place_of[ours.base_of(which, nth)] for nth in range(len(one.share.layers))]
        heads = _kv_heads(at, stock, one, places)
        shares.append(
            msgspec.structs.replace(
                one.share,
                tp_rank=at.rank.tp,
                tp_size=tp_size,
                kv_heads=heads,
                block_size=stock.block_size,
            )
        )
        tables.append(
            RegionTable(
                bases=[stock.kv_caches_base_addr[place] for place in places],
                strides=[strides[place] for place in places],
                block=_block(stock, one, heads),
                parts=one.regions.planes if one.share.latent else ("KV",),
                num_blocks=num_blocks,
                device=device,
            )
        )
    return messages.Metadata(
        engine_id=stock.engine_id,
        incarnation=incarnation,
        cache_shares=tuple(shares),
        agent_metadata=stock.agent_metadata,
        agent_metadata_crc32=zlib.crc32(stock.agent_metadata),
        regions=tuple(tables),
        groups=tuple(msgspec.structs.replace(group, block_size=stock.block_size) for group in ours.groups),
        seals=_NO_SEALS,
        staged=False,
    )


def check_tp_size(at: Address, share: CacheShare, ours: OurCache, known: Collection[int]) -> None:
    """Raise PeerIncompatible unless it is proven or configured that the stock engine has `share.tp_size` ranks.

    `share` describes the stock rank at `at`. The rank's number of heads proves the number of ranks, unless several
    ranks have copies of the same head. `known` are the configured numbers of ranks.
    """
    kv_heads, tp_size, model = share.kv_heads, share.tp_size, ours.layer_sets[0].model_kv_heads
    if tp_size == 1 or tp_size in known:
        return
    if not share.latent and model and kv_heads * tp_size == model:
        return
    proof = f"the first rank's {counted(kv_heads, 'head')} of {model or 'unknown'} do not prove it"
    why = f"tp_size: the parameters say {tp_size}, {proof}: set StockPeers.tp_sizes"
    raise at.failure(PeerIncompatible, why)


def reasons_not_read(stock: StockMetadata) -> list[str]:
    """Return why no kvflow rank can read the cache that `stock` describes; empty if there is no reason."""
    layout, split = stock.kv_cache_layout, stock.physical_blocks_per_logical_kv_block
    problems = {
        f"dcp_size {stock.dcp_size}, pcp_size {stock.pcp_size}: only 1 is read from": stock.dcp_size * stock.pcp_size
        > 1,
        f"state per request (ssm_sizes {stock.ssm_sizes}) is not read from stock engines": (
            any(stock.ssm_sizes) or stock.ple_block_len is not None
        ),
        f"a block of vLLM's is {counted(split, 'block')} of its kernels: such are not read from stock engines": split
        > 1,
        "packed layers (region_members, packed_member_layouts) are not read from stock engines": stock.packs_layers,
        f"kv_cache_layout: read are {', '.join(_LAYOUTS)}, theirs is {layout[:40]!a}": layout not in _LAYOUTS,
    }
    return [problem for problem, found_so in problems.items() if found_so]


def _region_indexes(at: Address, stock: StockMetadata, ours: OurCache) -> dict[int, int]:
    """Return a dict from the addresses of this rank's regions to the indexes of the stock rank's matching regions.

    PeerIncompatible unless both ranks have the same regions with the same groups.
    """
    regions = _regions_of(at, stock, ours.regions)
    groups = [region.group for region in regions]
    shown = stock.region_group_ids
    if shown is None and set(groups) != {0}:
        why = f"groups: ours {len(ours.groups)}, theirs are not in the metadata (vLLM before 0.30)"
        raise at.failure(PeerIncompatible, why)
    if shown is not None and shown != groups:
        raise at.failure(PeerIncompatible, f"groups of regions: ours {_listed(groups)}, theirs {_listed(shown)}")
    return {ours.base_of(*region.set_and_index): place for place, region in enumerate(regions)}


def _regions_of(at: Address, stock: StockMetadata, regions: Sequence[OurRegion]) -> Sequence[OurRegion]:
    """Return this rank's `regions` in the order in which the stock rank lists the matching regions.

    Regions match if the names of their first layers have the same number. If the stock rank sends no names, both orders
    are taken to be equal. PeerIncompatible if the regions do not match.
    """
    count = len(stock.kv_caches_base_addr)
    if count != len(regions):
        raise at.failure(PeerIncompatible, f"layers: ours {len(regions)}, theirs {counted(count, 'region')}")
    if stock.region_names is None:
        return regions
    names = [_NUMBER.findall(name) for name in stock.region_names]
    if any(len(one) != 1 for one in names):
        why = f"layers: {stock.region_names[0][:80]!a} and others: expected exactly one number in each name"
        raise at.failure(PeerIncompatible, why)
    numbers, by_number = [int(one[0]) for one in names], {region.number: region for region in regions}
    if len(by_number) < len(regions) or set(numbers) != by_number.keys():
        what = f"ours {_listed([region.number for region in regions])}, theirs {_listed(numbers)}"
        raise at.failure(PeerIncompatible, f"layers: {what}: regions are named by their first layers")
    return [by_number[number] for number in numbers]


def _listed(numbers: Collection[int]) -> str:
    return f"{len(numbers)} ({first_few(numbers, 16)})"


def _kv_heads(at: Address, stock: StockMetadata, ours: OurLayers, places: Sequence[int]) -> int:
    """Return the number of KV heads that a stock rank has for the layers `ours`.

    The number follows from the bytes of a block in the stock rank's regions with the indexes `places`. PeerIncompatible
    if these blocks differ in size, or do not hold a whole number of heads.
    """
    sizes = {stock.block_lens[place] for place in places}
    if len(sizes) > 1:
        why = f"block_lens: theirs {sorted(sizes)[:8]} for layers that have one size here"
        raise at.failure(PeerIncompatible, why)
    (size,) = sizes
    heads, rest = divmod(size, stock.block_size * ours.head_bytes)
    if rest or not heads:
        what = f"ours {counted(ours.head_bytes, 'byte')} for a head of a token, theirs {size} for a block"
        raise at.failure(PeerIncompatible, f"block_len: {what} of {counted(stock.block_size, 'token')}")
    return heads


def _block(stock: StockMetadata, ours: OurLayers, heads: int) -> BlockShape:
    tokens, run = stock.block_size, ours.head_bytes
    if stock.kv_cache_layout in HEADS_FIRST or heads == 1:
        return BlockShape(tokens, heads, run, run, tokens * run)
    return BlockShape(tokens, heads, run, heads * run, run)


def _num_blocks(at: Address, stock: StockMetadata) -> int:
    counts = set(stock.region_num_blocks or [stock.num_blocks])
    if len(counts) != 1:
        why = f"region_num_blocks: theirs {sorted(counts)[:8]}, expected one number for all regions"
        raise at.failure(PeerIncompatible, why)
    return counts.pop()


def _device(at: Address, stock: StockMetadata, ours: OurCache) -> Device:
    here = ours.layer_sets[0].regions.device.kind
    kinds = {_MEMORY.get(kind, kind[:20]) for kind in stock.region_mem_types or ()} or {here}
    if len(kinds) != 1:
        raise at.failure(PeerIncompatible, f"regions in several kinds of memory: {sorted(kinds)}")
    kind = kinds.pop()
    return Device(kind, stock.device_id if kind == "cuda" else 0)
