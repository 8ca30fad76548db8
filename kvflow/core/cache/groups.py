"""Groups: layers that share a block table, and which tokens of a prompt the blocks of a group hold.

Most models have one group: every layer attends to the whole prompt. If some layers attend only to a window, an engine
keeps only the window's blocks for these layers, which then have a block table of their own. Groups take their block ids
from one pool if the engine lays all layers over the same memory, else from separate pools.

Layers of one group may differ, for example in their number of heads; layers with the same layout are a `LayerSet`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvflow import checks
from kvflow.checks import INT64_MAX, counted, is_name, short_repr
from kvflow.core.bounds import Count, Name
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import Regions, device_of, map_regions
from kvflow.core.cache.state import SegmentLayout, StateLayout, segment_layouts
from kvflow.core.cache.tensors import (
    NAME_CHARS_MAX,
    KVCaches,
    LayerCache,
    checked_caches,
    memory_of,
    tensors_in,
    tensors_of,
    wire_name,
)
from kvflow.errors import LayoutError

GROUPS_MAX = 64
SETS_MAX = 64
WINDOW_MAX = 1 << 31
DEFAULT_NAME = "kv"
"""Name of the only group of a cache that was registered as a dict of layers."""


class GroupKind(enum.StrEnum):
    """Which tokens of a prompt the layers of a group attend to. This decides which blocks are offered and loaded."""

    FULL = "full"
    """The layers attend to all tokens of the prompt."""
    SLIDING = "sliding"
    """The layers attend to the last `window` tokens."""
    CHUNKED = "chunked"
    """The layers attend to the tokens since the last multiple of `window` (chunked local attention)."""
    STATE = "state"
    """The layers attend to no tokens: they keep one state per request, the state after the last computed token."""
    SHARDED = "sharded"
    """As "full", but a block id stands for a block on each tensor-parallel rank (decode context parallelism): rank r of
    n holds part r of n of the tokens. Only for latents (MLA), and for all groups of a cache or none."""


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of a group, as peers send them to each other.

    The constructor raises LayoutError if no group can have these values together.
    """

    name: Name
    block_size: Count
    """Number of tokens that a block id stands for, on all ranks together if they are sharded; 1 for a group with state
    per request."""
    kind: GroupKind = GroupKind.FULL
    window: Count = 0
    """Size in tokens of the window that the layers attend to; 0 if there is no window."""

    def __post_init__(self) -> None:
        windowed = self.kind is GroupKind.SLIDING or self.kind is GroupKind.CHUNKED
        window_fits = 0 < self.window <= WINDOW_MAX if windowed else self.window == 0
        size_fits = self.block_size == 1 if self.kind is GroupKind.STATE else 0 < self.block_size <= INT64_MAX
        if not (window_fits and size_fits and is_name(self.name, NAME_CHARS_MAX)):
            facts = f"kind {self.kind}, window {self.window}, block_size {self.block_size}"
            raise LayoutError(f"group {self.name[:80]!a}: impossible together: {facts}")

    @property
    def whole(self) -> bool:
        """True if the group's blocks hold the prompt from its first token on; False if they hold only its end."""
        return self.kind is GroupKind.FULL or self.kind is GroupKind.SHARDED

    def blocks_needed(self, tokens: int) -> int:
        """Return how many blocks a request has in this group once `tokens` tokens of its prompt are computed."""
        return -(-tokens // self.block_size) - self.first_needed(tokens) // self.block_size

    def first_needed(self, tokens: int) -> int:
        """Return the position of the first token that the group's blocks must hold once `tokens` tokens are computed.

        The reader may compute the last token again, to get its logits, so the blocks also hold what that token attends
        to.
        """
        match self.kind:
            case GroupKind.FULL | GroupKind.SHARDED:
                return 0
            case GroupKind.SLIDING:
                return max(tokens - self.window, 0)
            case GroupKind.CHUNKED:
                return max(tokens - 1, 0) // self.window * self.window
            case GroupKind.STATE:
                return max(tokens - 1, 0)


def tokens_held(groups: Sequence[GroupFacts], known: Sequence[int], counts: Sequence[int], num_tokens: int) -> int:
    """Return how far the blocks of every group reach, in tokens from the prompt's start: the minimum over the groups.

    Group i has only the first `known[i]` of its `counts[i]` blocks. `counts`: number of blocks of each group in the
    end; the last of them holds the last of `num_tokens` tokens.
    """
    tokens = num_tokens
    for group, have, count in zip(groups, known, counts, strict=True):
        if have < count:
            first = -(-num_tokens // group.block_size) - count
            tokens = min(tokens, (first + have) * group.block_size)
    return tokens


class LayerSet(NamedTuple):
    """Layers of one group that have the same layout. They are registered, compared with a peer's, and planned together.

    In a group with state per request each set has all layers, and one segment (`state.Segment`) of their tensors.
    """

    group: int
    caches: Mapping[str, LayerCache]
    layout: CacheLayout | SegmentLayout

    @property
    def regions(self) -> Regions:
        """Memory regions of these layers. LayoutError if a tensor does not match the layout."""
        if isinstance(self.layout, CacheLayout):
            return map_regions(self.layout, self.caches)
        self.layout.layout.check(self.caches)
        device = device_of(self.caches.items())
        places = np.array(self.layout.region_addresses(self.caches), dtype=np.uint64)
        return Regions(
            bases=places[:, 0],
            strides=places[:, 1],
            block=self.layout.block_shape,
            planes=self.layout.parts,
            num_blocks=self.layout.num_blocks,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of a cache that share a block table.

    The constructor raises LayoutError, which names the group, if the arguments contradict each other or the tensors.

    Example, for a model with full attention and a sliding window:

        groups = [
            CacheGroup("full", full_layers, CacheLayout.infer(full_layers, order="NHD", block_size=16)),
            CacheGroup("window", others, CacheLayout.infer(others, order="NHD", block_size=16), window=1024),
        ]
        await runtime.register_kv_caches(groups)
    """

    name: str
    """Name of the group, the same on all engines that exchange its blocks."""
    layers: KVCaches = field(repr=False)
    """Tensors by layer name: for each layer one tensor, a pair (K, V), or a tuple of state tensors."""
    layout: CacheLayout | StateLayout | Sequence[CacheLayout]
    """Layout of the layers or, if the layers differ, several layouts, each for some of the layers. With a `StateLayout`
    the group holds state per request: its blocks are slots, and a request has one slot."""
    window: int | None = None
    """Size in tokens of the window that the layers attend to; None if they attend to all tokens. Only blocks of the
    window are offered and loaded."""
    kind: GroupKind | str | None = None
    """Which tokens the layers attend to. Default: "state" for a StateLayout, "sliding" if `window` is given, else
    "full"."""
    pool: str | None = None
    """Name of the pool from which the group's block ids come; by default a pool of its own. If groups have the same
    pool, a block id is in one group's block table at a time, and the groups' tensors may be the same memory.
    """
    num_kv_heads: int | None = None
    """Number of KV heads that the whole model has in these layers; None: `Config.num_kv_heads`."""
    split: int = 1
    """Number of consecutive blocks of this group that make up one block of the engine's allocator; above 1 if the
    engine's kernels use smaller blocks than the allocator."""

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)
        set_field("name", wire_name(self.name, "a group's name"))
        what = f"group {self.name!r}"
        set_field("pool", self.name if self.pool is None else wire_name(self.pool, f"{what}: pool"))
        holds_state = isinstance(self.layout, StateLayout)
        set_field("kind", _kind(self.kind, self.window, holds_state, what))
        if (self.kind is GroupKind.SLIDING or self.kind is GroupKind.CHUNKED) != (self.window is not None):
            raise LayoutError(f"{what}: kind is {str(self.kind)!r}, window is {short_repr(self.window)}")
        if (self.kind is GroupKind.STATE) != holds_state:
            raise LayoutError(f"{what}: kind is {str(self.kind)!r}, layout is a {type(self.layout).__name__}")
        for name, most in (("window", WINDOW_MAX), ("num_kv_heads", INT64_MAX)):
            if (value := getattr(self, name)) is not None:
                set_field(name, checks.whole(value, f"{what}: {name}", least=1, most=most, error=LayoutError))
        try:
            set_field("layers", checked_caches(self.layers))
        except LayoutError as error:
            raise LayoutError(f"{what}: layers: {error}") from error
        set_field("layout", _layouts(self.layers, self.layout, what))
        set_field("split", checks.whole(self.split, f"{what}: split", least=1, error=LayoutError))
        if self.kind is GroupKind.SHARDED and (self.split > 1 or not _hold_latents(self.layouts)):
            raise LayoutError(f"{what}: kind is 'sharded': expected latents (MLA) and split 1, got split {self.split}")
        if self.num_blocks % self.split:
            raise LayoutError(f"{what}: split: num_blocks, {self.num_blocks}, is not a multiple of {self.split}")

    @property
    def layouts(self) -> tuple[CacheLayout | StateLayout, ...]:
        assert isinstance(self.layout, tuple), "settled"
        return self.layout

    @property
    def sets(self) -> tuple[tuple[Mapping[str, LayerCache], CacheLayout | StateLayout], ...]:
        """(tensors by layer name, layout) for each layout of the group."""
        return tuple(({name: self.layers[name] for name in layout.layer_names}, layout) for layout in self.layouts)

    @property
    def facts(self) -> GroupFacts:
        assert isinstance(self.kind, GroupKind), "settled"
        first = self.layouts[0]
        block_size = first.block_size if isinstance(first, CacheLayout) else 1
        return GroupFacts(name=self.name, block_size=block_size, kind=self.kind, window=self.window or 0)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, or slots of state, in the group's tensors."""
        first = self.layouts[0]
        return first.num_blocks if isinstance(first, CacheLayout) else first.num_slots

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block in all layers together. A tensor that several layers share counts once."""
        size = 0
        for caches, layout in self.sets:
            if isinstance(layout, CacheLayout):
                tensors = [tensor for name, layer in caches.items() for tensor in tensors_of(name, layer)]
                distinct = len({memory_of(tensor) for tensor in tensors})
                size += layout.block_size_bytes * distinct // len(tensors)
            else:
                size += layout.slot_size_bytes
        return size


def facts_of_engine(group: CacheGroup, tp_size: int) -> GroupFacts:
    """Return the facts of `group` in an engine of `tp_size` tensor-parallel ranks.

    If its tokens are sharded over these ranks, its block size is the tokens of a block on all of them together.
    """
    facts = group.facts
    if group.kind is not GroupKind.SHARDED:
        return facts
    return msgspec.structs.replace(facts, block_size=facts.block_size * tp_size)


def _hold_latents(layouts: Sequence[CacheLayout | StateLayout]) -> bool:
    return all(isinstance(layout, CacheLayout) and layout.latent for layout in layouts)


def _kind(kind: object, window: object, holds_state: bool, what: str) -> GroupKind:
    if kind is None and holds_state:
        return GroupKind.STATE
    if kind is None:
        return GroupKind.FULL if window is None else GroupKind.SLIDING
    return GroupKind(checks.one_of(kind, f"{what}: kind", known=GroupKind, error=LayoutError))


def _layouts(layers: KVCaches, layout: object, what: str) -> tuple[CacheLayout | StateLayout, ...]:
    if isinstance(layout, StateLayout):
        layout.check(layers)
        return (layout,)
    layouts = layout if isinstance(layout, tuple | list) else (layout,)
    if not 0 < len(layouts) <= GROUPS_MAX or not all(isinstance(each, CacheLayout) for each in layouts):
        raise LayoutError(
            f"{what}: layout: expected a CacheLayout or 1 to {GROUPS_MAX} of them, got {short_repr(layout)}"
        )
    first = layouts[0]
    named = [name for each in layouts for name in each.layer_names]
    if len(named) != len(set(named)) or set(named) != set(layers):
        odd = next(iter(sorted(set(named) ^ set(layers)) or named))
        count = counted(len(layers), "layer")
        raise LayoutError(f"{what}: {count}, layouts name {len(named)}: not one layout for {odd!r}")
    for each in layouts:
        for name in ("block_size", "num_blocks"):
            if getattr(each, name) != getattr(first, name):
                raise LayoutError(f"{what}: {name} is {getattr(first, name)} and {getattr(each, name)} in its layouts")
    return tuple(layouts)


def groups_of(kv_caches: KVCaches | Sequence[CacheGroup], layout: CacheLayout | None) -> tuple[CacheGroup, ...]:
    """Return `kv_caches` as groups. A dict of layers, which needs a `layout`, becomes one group of full attention.

    Raises:
        LayoutError: groups contradict each other, for example by equal names; or the tensors do not match `layout`.
    """
    if not isinstance(kv_caches, tuple | list) or tensors_in(kv_caches):
        caches = checked_caches(cast(KVCaches, kv_caches))
        if layout is None:
            hint = "CacheLayout.infer(kv_caches, order=..., block_size=...)"
            raise LayoutError(f"layout: a cache that is given as a dict of layers needs one, such as {hint}")
        checks.instance(layout, CacheLayout, "layout", error=LayoutError)
        layout.check(caches)
        return (CacheGroup(DEFAULT_NAME, caches, layout),)
    if layout is not None:
        raise LayoutError("layout: groups have layouts of their own")
    if not 0 < len(kv_caches) <= GROUPS_MAX or not all(isinstance(group, CacheGroup) for group in kv_caches):
        raise LayoutError(f"kv_caches: expected 1 to {GROUPS_MAX} CacheGroups, got {short_repr(kv_caches)}")
    groups = tuple(kv_caches)
    _check_unique([group.name for group in groups], "group")
    for state in (False, True):
        layouts = [
            group_layout
            for group in groups
            if (group.kind is GroupKind.STATE) is state
            for group_layout in group.layouts
        ]
        _check_unique([index for group_layout in layouts for index in group_layout.layer_indices], "layer")
    if len({group.kind is GroupKind.SHARDED for group in groups}) > 1:
        kinds = ", ".join(f"{group.name!r} is {group.kind}" for group in groups)
        raise LayoutError(f"kv_caches: tokens are sharded in all groups or in none: {kinds}")
    pools: dict[str, CacheGroup] = {}
    for group in groups:
        assert group.pool is not None, "settled"
        first = pools.setdefault(group.pool, group)
        if first.num_blocks // first.split != group.num_blocks // group.split:
            raise LayoutError(
                f"group {group.name!r}: it has {counted(group.num_blocks // group.split, 'block')}, "
                f"group {first.name!r} of the same pool {group.pool!r} has {first.num_blocks // first.split}"
            )
    return groups


def named_layers(sets: Iterable[LayerSet]) -> list[tuple[str, LayerCache]]:
    """Return (name, tensors) of each layer in `sets`, set by set. A layer in several sets is returned several times."""
    return [layer for layer_set in sets for layer in layer_set.caches.items()]


def layer_sets(groups: Sequence[CacheGroup], tp_size: int) -> tuple[LayerSet, ...]:
    """Divide the layers of a rank into sets with one layout each. Return the sets, group by group.

    LayoutError if there are more than `SETS_MAX` sets, since no peer accepts more.
    """
    sets = tuple(layer_set for index, group in enumerate(groups) for layer_set in sets_of(index, group.sets, tp_size))
    if len(sets) > SETS_MAX:
        raise LayoutError(f"kv_caches: layouts and segments of state: {len(sets)}, at most {SETS_MAX} in all")
    return sets


def sets_of(
    group: int, layers: Iterable[tuple[Mapping[str, LayerCache], CacheLayout | StateLayout]], tp_size: int
) -> Iterator[LayerSet]:
    """Yield a `LayerSet` for each layout of a group or, for state per request, for each segment of the state tensors.

    `group`: index of the group. `layers`: (tensors by layer name, layout) pairs.
    """
    for caches, layout in layers:
        for set_layout in (layout,) if isinstance(layout, CacheLayout) else segment_layouts(layout, tp_size):
            yield LayerSet(group, caches, set_layout)


def _check_unique(values: Sequence[object], what: str) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            hint = "; give each layout its layer_indices" if what == "layer" else ""
            raise LayoutError(f"kv_caches: {what} {value!r} is there twice{hint}")
        seen.add(value)


def check_sets_disjoint(sets: Sequence[tuple[CacheGroup, Regions]]) -> None:
    """Raise LayoutError if a load into one set of layers could write into the memory of another set.

    `sets`: (group of the layers, regions of the layers) of each set. Two sets of one group may lie side by side in each
    block of the pool, but share no byte. Sets of two groups with one pool may share bytes, since a block belongs to one
    group at a time. Sets of different pools must not even interleave.
    """
    for (group, regions), (other_group, others) in itertools.combinations(sets, 2):
        for region, other_region in zip(*np.nonzero(_overlap(_extents(regions), _extents(others))), strict=True):
            stride, other_stride = int(regions.strides[region]), int(others.strides[other_region])
            row, other_row = stride * group.split, other_stride * other_group.split
            sizes = row - stride + regions.block_size_bytes, other_row - other_stride + others.block_size_bytes
            offset = int(others.bases[other_region]) - int(regions.bases[region])
            first, last = sizes if offset >= 0 else sizes[::-1]
            if group.pool == other_group.pool and row == other_row:
                inside = abs(offset) + last <= row
                if inside and (group.name != other_group.name or abs(offset) >= first):
                    continue
            raise LayoutError(
                f"group {group.name!r} and group {other_group.name!r} overlap: regions begin {counted(offset, 'byte')} "
                f"apart, block strides are {row} and {counted(other_row, 'byte')}, blocks have {sizes[0]} and "
                f"{sizes[1]}, pools are {group.pool!r} and {other_group.pool!r}"
            )


def _extents(regions: Regions) -> npt.NDArray[np.int64]:
    """Return two rows: the address of each region's first byte, and the address just after each region's last byte."""
    bases = regions.bases.astype(np.int64)
    ends = bases + (regions.num_blocks - 1) * regions.strides.astype(np.int64) + regions.block_size_bytes
    return np.stack((bases, ends))


def _overlap(extents: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    meet: npt.NDArray[np.bool_] = (extents[0][:, None] < others[1]) & (others[0] < extents[1][:, None])
    return meet
