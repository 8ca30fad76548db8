"""What a stock rank's metadata means in kvflow's words, and ours in a stock reader's: layers, blocks, heads, memory.

A stock rank says how many bytes a block has, not of how many heads: that follows from our own cache, of the same model.
It cannot say how many ranks its engine has, either; parameters do, and nobody signs them. A question about a rank that
does not exist ends a stock listener, so what is said is believed only where the first rank's heads prove it, or where
this engine was told that there are such engines.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from kvflow.core.cache.groups import GroupFacts
from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Regions
from kvflow.core.plan.topology import CacheShare
from kvflow.core.protocol import messages
from kvflow.core.protocol.messages import RegionTable, SealLocation
from kvflow.core.stock.wire import Shown, StockMetadata
from kvflow.limits import SEAL_HOLD_S_MAX

HEADS_FIRST = ("LBHNC", "HND")
TOKENS_FIRST = ("LBNHC", "NHD")
_LAYOUTS = (*HEADS_FIRST, *TOKENS_FIRST)
_MEMORY = {"DRAM": "cpu", "VRAM": "cuda"}
_NUMBER = re.compile(r"\d+")
_NO_SEALS = SealLocation(address=1, count=1, hold_s=SEAL_HOLD_S_MAX)


class Unfit(Exception):
    """A stock rank whose cache we cannot read, or that cannot read ours: what, ours and theirs."""


class OurCache(NamedTuple):
    """What of our own rank a stock one is compared with: one group of full attention, and its one set of layers."""

    share: CacheShare
    regions: Regions
    group: GroupFacts

    @property
    def head_bytes(self) -> int:
        """Of one head of one token, K and V."""
        return self.regions.block.run * len(self.regions.parts)

    @property
    def model_kv_heads(self) -> int:
        """0 if this rank does not know."""
        if self.share.latent:
            return 1
        return self.share.model_kv_heads or (self.share.kv_heads if self.share.tp_size == 1 else 0)


def our_cache(shares: Sequence[CacheShare], regions: Sequence[Regions], groups: Sequence[GroupFacts]) -> OurCache:
    """Unfit if our cache is not one that is exchanged with stock engines."""
    if len(shares) != 1 or len(groups) != 1 or not groups[0].whole or shares[0].part:
        found = f"{len(groups)} groups, {len(shares)} sets of layers"
        raise Unfit(
            f"our cache: {found}: one of full attention, whose layers are alike, is exchanged with stock engines"
        )
    if shares[0].pp_size != 1:
        raise Unfit(f"our cache: pp_size {shares[0].pp_size}: only 1 is exchanged with stock engines")
    return OurCache(shares[0], regions[0], groups[0])


def metadata_of(shown: Shown, agent: str, ours: OurCache, *, tp_rank: int, tp_size: int) -> messages.Metadata:
    """A stock rank as `messages.Metadata`, to be judged as any other. Unfit, or WireError, names what cannot be."""
    found = shown.metadata
    if problems := unread(found):
        raise Unfit("; ".join(problems))
    heads = _heads(found, ours)
    layers = _layer_numbers(found, ours)
    share = msgspec.structs.replace(
        ours.share,
        tp_rank=tp_rank,
        tp_size=tp_size,
        layers=layers,
        kv_heads=heads,
        block_size=found.block_size,
    )
    device_kind, device_index = _device(found, ours)
    table = RegionTable(
        bases=found.kv_caches_base_addr,
        strides=found.block_strides or found.block_lens,
        block=_block(found, ours, heads),
        parts=ours.regions.parts if ours.share.latent else ("KV",),
        num_blocks=_num_blocks(found),
        device_kind=device_kind,
        device_index=device_index,
    )
    return messages.Metadata(
        engine_id=found.engine_id,
        incarnation=agent,
        clock_s=shown.clock_s,
        cache_shares=(share,),
        agent_metadata=found.agent_metadata,
        agent_metadata_crc32=messages.checksum(found.agent_metadata),
        regions=(table,),
        groups=(GroupFacts(name=ours.group.name, block_size=found.block_size),),
        seals=_NO_SEALS,
        staged=False,
    )


def check_tp_size(kv_heads: int, tp_size: int, ours: OurCache, known: Collection[int]) -> None:
    """Unfit unless an engine with so many heads on its first rank has, or may well have, `tp_size` ranks.

    `known` are the sizes that this engine was told of: heads that are on several ranks prove none.
    """
    model = ours.model_kv_heads
    if tp_size == 1 or tp_size in known:
        return
    if not ours.share.latent and model and kv_heads * tp_size == model:
        return
    proof = f"a rank with {kv_heads} of {model or 'so many'} heads does not prove it"
    raise Unfit(f"tp_size: the parameters say {tp_size}, {proof}: name it among the known ones (stock_tp_sizes)")


def expanded(ids: Sequence[int], split: int) -> tuple[int, ...]:
    """Blocks of vLLM's as a rank counts them, where `split` of its own are one of those."""
    return tuple(ids) if split == 1 else tuple(number * split + part for number in ids for part in range(split))


def unread(found: StockMetadata) -> list[str]:
    """Why no cache like this one is read, whatever ours is; empty if it may be."""
    groups, sizes = set(found.region_group_ids or [0]), sorted(set(found.block_lens))
    members = found.packed_member_layouts or any(len(names) > 1 for names in found.region_members)
    layout = found.kv_cache_layout
    problems = {
        f"dcp_size {found.dcp_size}, pcp_size {found.pcp_size}: only 1 is read from": found.dcp_size * found.pcp_size
        > 1,
        f"state per request (ssm_sizes {found.ssm_sizes}) is not read from stock engines": (
            any(found.ssm_sizes) or found.ple_block_len is not None
        ),
        "regions that hold several layers are not read from stock engines": members,
        f"groups {sorted(groups)[:8]}: one group is read from stock engines": groups != {0},
        f"blocks of different sizes: {sizes[:8]} bytes": len(sizes) != 1,
        f"kv_cache_layout: read are {', '.join(_LAYOUTS)}, theirs is {layout[:40]!a}": layout not in _LAYOUTS,
    }
    return [problem for problem, found_so in problems.items() if found_so]


def _heads(found: StockMetadata, ours: OurCache) -> int:
    each = found.block_size * ours.head_bytes
    heads, rest = divmod(found.block_lens[0], each)
    if rest or not heads:
        what = f"ours {ours.head_bytes} bytes for a head of a token, theirs {found.block_lens[0]} for a block"
        raise Unfit(f"block_len: {what} of {found.block_size} tokens")
    return heads


def _layer_numbers(found: StockMetadata, ours: OurCache) -> tuple[int, ...]:
    """The number of each region's layer; theirs are in our order where they have no names."""
    count = len(found.kv_caches_base_addr)
    if count != len(ours.share.layers):
        raise Unfit(f"layers: ours {len(ours.share.layers)}, theirs {count} regions")
    if found.region_names is None:
        return tuple(sorted(ours.share.layers))
    numbers = [_NUMBER.findall(name) for name in found.region_names]
    if any(len(one) != 1 for one in numbers):
        raise Unfit(f"layers: {found.region_names[0][:80]!a} and others have not one number each")
    return tuple(int(one[0]) for one in numbers)


def _block(found: StockMetadata, ours: OurCache, heads: int) -> BlockShape:
    tokens, run = found.block_size, ours.head_bytes
    if found.kv_cache_layout in HEADS_FIRST or heads == 1:
        return BlockShape(tokens, heads, run, run, tokens * run)
    return BlockShape(tokens, heads, run, heads * run, run)


def _num_blocks(found: StockMetadata) -> int:
    counts = set(found.region_num_blocks or [found.num_blocks])
    if len(counts) != 1:
        raise Unfit(f"regions of {sorted(counts)[:8]} blocks: all have as many as each other where they are read")
    return counts.pop()


def _device(found: StockMetadata, ours: OurCache) -> tuple[str, int]:
    kinds = {_MEMORY.get(kind, kind[:20]) for kind in found.region_mem_types or ()} or {ours.regions.device.kind}
    if len(kinds) != 1:
        raise Unfit(f"regions in several kinds of memory: {sorted(kinds)}")
    kind = kinds.pop()
    return kind, found.device_id if kind == "cuda" else 0
