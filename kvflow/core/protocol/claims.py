"""Checks of a peer's claims about its cache: its regions, its cache shares and its groups of layers.

Decoding bounds each number alone. This module checks that the numbers are possible together, before this engine reads
from any address. If a claim is impossible, a check raises WireError, which has the claimed values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvflow.checks import INT64_MAX, counted, is_name
from kvflow.core.cache.groups import GROUPS_MAX, SETS_MAX, GroupFacts, GroupKind
from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Regions
from kvflow.core.cache.state import ROWS_MAX
from kvflow.core.plan.topology import CacheShare
from kvflow.core.protocol.codec import WireError
from kvflow.core.protocol.messages import REGIONS_MAX, RegionTable

_PART_CHARS_MAX = 4096
_PARTS = (("K", "V"), ("KV",), ("latent",))


def regions_to_wire(regions: Regions) -> RegionTable:
    return RegionTable(
        bases=regions.bases.tolist(),
        strides=regions.strides.tolist(),
        block=regions.block,
        parts=regions.planes,
        num_blocks=regions.num_blocks,
        device=regions.device,
    )


def all_regions_from_wire(tables: Sequence[RegionTable]) -> tuple[Regions, ...]:
    """Convert a peer's region tables, one for each set of layers, to `Regions`.

    WireError if the numbers in a table contradict each other, or for more than SETS_MAX tables or REGIONS_MAX regions.
    """
    count = sum(len(table.bases) for table in tables)
    if len(tables) > SETS_MAX or count > REGIONS_MAX:
        found = f"{len(tables)} with {counted(count, 'region')}"
        raise WireError(f"region tables: {found}, at most {SETS_MAX} with {REGIONS_MAX}")
    return tuple(map(regions_from_wire, tables))


def regions_from_wire(table: RegionTable) -> Regions:
    """Convert a peer's region table to `Regions`. WireError if the numbers in `table` contradict each other."""
    count = len(table.bases)
    if not count or len(table.strides) != count:
        raise WireError(f"region table: {counted(count, 'base')} and {counted(len(table.strides), 'stride')}")
    of_state = 0 < len(set(table.parts)) == len(table.parts) <= ROWS_MAX and table.block.tokens == 1
    if (table.parts not in _PARTS and not of_state) or count % len(table.parts):
        raise WireError(f"region table: {counted(count, 'region')}, parts of a layer {str(table.parts)[:80]}")
    if not _is_dense(table.block):
        raise WireError(f"region table: {counted(table.num_blocks, 'block')} of shape {tuple(table.block)}")
    size = table.block.size_bytes
    for base, stride in zip(table.bases, table.strides, strict=True):
        if stride < size or base + stride * table.num_blocks > INT64_MAX:
            raise WireError(f"region table: base {base}, stride {stride}, {counted(table.num_blocks, 'block')}")
    return Regions(
        bases=np.array(table.bases, dtype=np.uint64),
        strides=np.array(table.strides, dtype=np.uint64),
        block=table.block,
        planes=table.parts,
        num_blocks=table.num_blocks,
        device=table.device,
    )


def _is_dense(block: BlockShape) -> bool:
    """Return True if a block has no gaps, and holds either token after token or head after head."""
    tokens, heads, run = block[:3]
    if min(tokens, heads, run) < 1 or max(tokens, heads, run) >= 1 << 31:
        return False
    return block[3:] in ((heads * run, run), (run, tokens * run))


def check_cache_shares(shares: Sequence[CacheShare]) -> None:
    """Raise WireError if `shares` cannot be all the cache shares of one rank.

    For example, two of a rank's shares never name different ranks, and never have a layer in common.
    """
    count = sum(len(share.layers) for share in shares)
    if not 0 < len(shares) <= SETS_MAX or count > REGIONS_MAX:
        found = f"{len(shares)} with {counted(count, 'layer')}"
        raise WireError(f"cache shares: {found}, at most {SETS_MAX} with {REGIONS_MAX}")
    for share in shares:
        _check_cache_share(share)
    if len(shares) == 1:
        return
    if len({(one.tp_rank, one.tp_size, one.pp_rank, one.pp_size, one.sharded) for one in shares}) > 1:
        raise WireError("cache shares: of several ranks, or some with sharded tokens")
    if len({(one.part, layer) for one in shares for layer in one.layers}) < sum(len(one.layers) for one in shares):
        raise WireError("cache shares: a layer is in two shares")


def _check_cache_share(share: CacheShare) -> None:
    if share.tp_rank >= share.tp_size or share.pp_rank >= share.pp_size:
        sizes = (share.tp_rank, share.tp_size, share.pp_rank, share.pp_size)
        raise WireError(f"cache share: (tp_rank, tp_size, pp_rank, pp_size) are {sizes}")
    if share.part and (not is_name(share.part, _PART_CHARS_MAX) or share.latent or share.model_kv_heads < 1):
        raise WireError(f"cache share: part {share.part[:80]!a}, latent is {share.latent}")
    if share.sharded and (not share.latent or share.block_size % share.tp_size):
        tokens = f"latent is {share.latent}, block_size {share.block_size}, tp_size {share.tp_size}"
        raise WireError(f"cache share: sharded tokens, {tokens}")
    if not 0 < len(set(share.layers)) == len(share.layers):
        raise WireError(f"cache share: {counted(len(share.layers), 'layer')}: expected at least one, and none twice")


def check_sets(shares: Sequence[CacheShare], regions: Sequence[Regions], groups: Sequence[GroupFacts]) -> None:
    """Raise WireError if a rank cannot have these cache shares, regions and groups together.

    `shares[i]` and `regions[i]` belong to the same set of layers.
    """
    check_cache_shares(shares)
    if not 0 < len(groups) <= GROUPS_MAX or len({group.name for group in groups}) < len(groups):
        raise WireError(f"groups: {len(groups)}, expected 1 to {GROUPS_MAX} of different names")
    if len(regions) != len(shares):
        raise WireError(f"cache shares: {len(shares)}, but {counted(len(regions), 'region table')}")
    num_blocks: dict[int, int] = {}
    for share, region in zip(shares, regions, strict=True):
        _check_set(share, region)
        if share.group >= len(groups) or groups[share.group].block_size != share.block_size:
            raise WireError(f"cache share: group {share.group} of {len(groups)}, block_size {share.block_size}")
        if (groups[share.group].kind is GroupKind.STATE) != bool(share.part):
            raise WireError(f"cache share: part {share.part!a} in a group of kind {groups[share.group].kind}")
        if (groups[share.group].kind is GroupKind.SHARDED) != share.sharded:
            raise WireError(f"cache share: sharded is {share.sharded}, the group's kind {groups[share.group].kind}")
        if num_blocks.setdefault(share.group, region.num_blocks) != region.num_blocks:
            raise WireError(f"cache shares: group {share.group} has {num_blocks[share.group]} and other blocks")
    if len(num_blocks) != len(groups):
        raise WireError(f"cache shares: of {counted(len(num_blocks), 'group')}, but there are {len(groups)}")
    if len({region.device for region in regions}) > 1:
        raise WireError("region tables: on several devices")


def _check_set(share: CacheShare, regions: Regions) -> None:
    if len(share.layers) * len(regions.planes) != len(regions):
        layers = counted(len(share.layers), "layer")
        raise WireError(f"cache share: {layers}, {counted(len(regions), 'region')} {regions.planes}")
    block = regions.block
    if (share.block_size, share.kv_heads) != (block.tokens * share.shard.ranks, block.heads):
        raise WireError(
            f"cache share: block_size {share.block_size}, kv_heads {share.kv_heads}, "
            f"model_kv_heads {share.model_kv_heads}, blocks of shape {tuple(block)}"
        )
    if share.part and (block.tokens != 1 or regions.planes in _PARTS):
        raise WireError(f"cache share: part {share.part!a}, blocks of shape {tuple(block)}")
    if not share.part and regions.planes not in _PARTS:
        raise WireError(f"cache share: parts of a layer {str(regions.planes)[:80]}")
    if share.latent != (regions.planes == ("latent",)) or (share.latent and block.heads != 1):
        raise WireError(
            f"cache share: latent is {share.latent}, parts of a layer are {regions.planes}, "
            f"of {counted(block.heads, 'head')}"
        )
