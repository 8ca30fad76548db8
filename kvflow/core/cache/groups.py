"""Groups: layers whose blocks are found by one block table, and which tokens of a prompt those blocks hold.

Most models have one group: every layer attends to the whole prompt, so one list of block ids per request says it all.
Where some layers attend to a window only, an engine keeps the window's blocks for them and gives those layers a block
table of their own. Groups may take their blocks from one pool, as an engine does that lays all layers over the same
memory, or from pools of their own.

A group may hold layers that look different, such as some with fewer heads. Layers that look alike are a `LayerSet`:
that is what is registered, compared with a peer's and planned.
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
from kvflow.checks import INT64_MAX, counted, is_name, shown
from kvflow.core.bounds import Count, Name
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import Regions, device_of, map_regions
from kvflow.core.cache.state import StateLayout, StatePart, state_parts
from kvflow.core.cache.tensors import (
    NAME_CHARS_MAX,
    KVCaches,
    LayerCache,
    checked_caches,
    memory_of,
    tensors_of,
    wire_name,
)
from kvflow.errors import LayoutError

GROUPS_MAX = 64
SETS_MAX = 64
WINDOW_MAX = 1 << 31
DEFAULT_NAME = "kv"
"""Name of the one group of a cache that was registered as a dict."""


class GroupKind(enum.StrEnum):
    """Part of a prompt's tokens that the layers of a group attend to, and so which blocks there are to move."""

    FULL = "full"
    """All tokens."""
    SLIDING = "sliding"
    """The last `window` tokens."""
    CHUNKED = "chunked"
    """Tokens since the last multiple of `window`: chunked local attention."""
    STATE = "state"
    """No tokens: there is a state per request, of the last token that was computed."""


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group as its peers know it. `window` is in tokens, 0 where there is none; a state's block size is 1.

    LayoutError if a group cannot have these facts.
    """

    name: Name
    block_size: Count
    kind: GroupKind = GroupKind.FULL
    window: Count = 0

    def __post_init__(self) -> None:
        windowed = self.kind is GroupKind.SLIDING or self.kind is GroupKind.CHUNKED
        window_fits = 0 < self.window <= WINDOW_MAX if windowed else self.window == 0
        size_fits = self.block_size == 1 if self.kind is GroupKind.STATE else 0 < self.block_size <= INT64_MAX
        if not (window_fits and size_fits and is_name(self.name, NAME_CHARS_MAX)):
            facts = f"kind {self.kind}, window {self.window}, block_size {self.block_size}"
            raise LayoutError(f"group {self.name[:80]!a}: {facts} cannot be")

    @property
    def whole(self) -> bool:
        """True if the blocks hold a prompt from its first token on; else they hold its end."""
        return self.kind is GroupKind.FULL

    def blocks_needed(self, tokens: int) -> int:
        """Number of blocks that matter once `tokens` of a prompt are computed."""
        return -(-tokens // self.block_size) - self.first_needed(tokens) // self.block_size

    def first_needed(self, tokens: int) -> int:
        """The first token that matters once `tokens` are computed.

        The last of them may be computed again, to get its logits: what it attends to is part of it.
        """
        match self.kind:
            case GroupKind.FULL:
                return 0
            case GroupKind.SLIDING:
                return max(tokens - self.window, 0)
            case GroupKind.CHUNKED:
                return max(tokens - 1, 0) // self.window * self.window
            case GroupKind.STATE:
                return max(tokens - 1, 0)


def tokens_held(groups: Sequence[GroupFacts], known: Sequence[int], counts: Sequence[int], num_tokens: int) -> int:
    """Tokens of a prompt that the first `known` blocks of each group hold, if there are `counts` in the end."""
    tokens = num_tokens
    for group, have, count in zip(groups, known, counts, strict=True):
        if have < count:
            first = 0 if group.whole else -(-num_tokens // group.block_size) - count
            tokens = min(tokens, (first + have) * group.block_size)
    return tokens


class LayerSet(NamedTuple):
    """Layers of one group that look alike: their tensors, and how these look. Of state, one segment of the tensors."""

    group: int
    caches: Mapping[str, LayerCache]
    layout: CacheLayout | StatePart

    @property
    def regions(self) -> Regions:
        """The regions of these layers. LayoutError where they are not as the layout says."""
        if isinstance(self.layout, CacheLayout):
            return map_regions(self.layout, self.caches)
        self.layout.layout.check(self.caches)
        device = device_of(self.caches.items())
        places = np.array(self.layout.places(self.caches), dtype=np.uint64)
        return Regions(
            bases=places[:, 0],
            strides=places[:, 1],
            block=self.layout.block_shape,
            parts=self.layout.parts,
            num_blocks=self.layout.num_blocks,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of a cache that share a block table.

    `layers` are their tensors by name, as `Runtime.register_kv_caches` takes them for a cache of one group. `layout` is
    theirs, or there are several, each of some of the layers, if they do not all look alike. With a `window` (in tokens)
    the layers attend to that many last tokens, or with kind "chunked" to those since its last multiple; only blocks of
    the window are offered and loaded. Groups with the same `pool` have their block ids in common: a block is in the
    table of one group at a time, and the groups' tensors may be the same memory. By default a group has a pool of its
    own. Where an engine's kernels take smaller blocks than its pool hands out, `split` of the group's blocks, one
    behind the other, are one of the pool's. `num_kv_heads` is the model's for these layers, where it is not
    Config.num_kv_heads.

    With a `StateLayout` the group holds state per request: a slot is its block, and requests name one.

    Raises LayoutError naming the group if the facts cannot be right.
    """

    name: str
    layers: KVCaches = field(repr=False)
    layout: CacheLayout | StateLayout | Sequence[CacheLayout]
    window: int | None = None
    kind: GroupKind | str | None = None
    pool: str | None = None
    num_kv_heads: int | None = None
    split: int = 1

    def __post_init__(self) -> None:
        settle = partial(object.__setattr__, self)
        settle("name", wire_name(self.name, "a group's name"))
        what = f"group {self.name!r}"
        settle("pool", self.name if self.pool is None else wire_name(self.pool, f"{what}: pool"))
        holds_state = isinstance(self.layout, StateLayout)
        settle("kind", _kind(self.kind, self.window, holds_state, what))
        if (self.kind is GroupKind.SLIDING or self.kind is GroupKind.CHUNKED) != (self.window is not None):
            raise LayoutError(f"{what}: kind is {str(self.kind)!r}, window is {shown(self.window)}")
        if (self.kind is GroupKind.STATE) != holds_state:
            raise LayoutError(f"{what}: kind is {str(self.kind)!r}, layout is a {type(self.layout).__name__}")
        for name, most in (("window", WINDOW_MAX), ("num_kv_heads", INT64_MAX)):
            if (value := getattr(self, name)) is not None:
                settle(name, checks.whole(value, f"{what}: {name}", least=1, most=most, error=LayoutError))
        try:
            settle("layers", checked_caches(self.layers))
        except LayoutError as error:
            raise LayoutError(f"{what}: layers: {error}") from error
        settle("layout", _layouts(self.layers, self.layout, what))
        settle("split", checks.whole(self.split, f"{what}: split", least=1, error=LayoutError))
        if self.num_blocks % self.split:
            raise LayoutError(f"{what}: split: num_blocks, {self.num_blocks}, is no multiple of {self.split}")

    @property
    def layouts(self) -> tuple[CacheLayout | StateLayout, ...]:
        """The layouts of the group, one or several."""
        assert isinstance(self.layout, tuple), "settled"
        return self.layout

    @property
    def sets(self) -> tuple[tuple[Mapping[str, LayerCache], CacheLayout | StateLayout], ...]:
        """The layers of each layout."""
        return tuple(({name: self.layers[name] for name in one.layer_names}, one) for one in self.layouts)

    @property
    def facts(self) -> GroupFacts:
        assert isinstance(self.kind, GroupKind), "settled"
        first = self.layouts[0]
        block_size = first.block_size if isinstance(first, CacheLayout) else 1
        return GroupFacts(name=self.name, block_size=block_size, kind=self.kind, window=self.window or 0)

    @property
    def num_blocks(self) -> int:
        first = self.layouts[0]
        return first.num_blocks if isinstance(first, CacheLayout) else first.num_slots

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block over all layers; a tensor that several layers share counts once."""
        size = 0
        for caches, layout in self.sets:
            if isinstance(layout, CacheLayout):
                tensors = [tensor for name, layer in caches.items() for tensor in tensors_of(name, layer)]
                distinct = len({memory_of(tensor) for tensor in tensors})
                size += layout.block_size_bytes * distinct // len(tensors)
            else:
                size += layout.slot_size_bytes
        return size


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
    if not 0 < len(layouts) <= GROUPS_MAX or not all(isinstance(one, CacheLayout) for one in layouts):
        raise LayoutError(f"{what}: layout: expected a CacheLayout or 1 to {GROUPS_MAX} of them, got {shown(layout)}")
    first = layouts[0]
    named = [name for one in layouts for name in one.layer_names]
    if len(named) != len(set(named)) or set(named) != set(layers):
        odd = next(iter(sorted(set(named) ^ set(layers)) or named))
        count = counted(len(layers), "layer")
        raise LayoutError(f"{what}: {count}, layouts name {len(named)}: not one layout for {odd!r}")
    for one in layouts:
        for name in ("block_size", "num_blocks"):
            if getattr(one, name) != getattr(first, name):
                raise LayoutError(f"{what}: {name} is {getattr(first, name)} and {getattr(one, name)} in its layouts")
    return tuple(layouts)


def groups_of(kv_caches: KVCaches | Sequence[CacheGroup], layout: CacheLayout | None) -> tuple[CacheGroup, ...]:
    """Cache as groups; a dict of layers with its layout is one group of full attention. Raises LayoutError."""
    if not isinstance(kv_caches, tuple | list):
        if layout is None:
            raise LayoutError("layout: a cache that is given as a dict of layers needs one")
        checks.instance(layout, CacheLayout, "layout", error=LayoutError)
        caches = checked_caches(cast(KVCaches, kv_caches))
        layout.check(caches)
        return (CacheGroup(DEFAULT_NAME, caches, layout),)
    if layout is not None:
        raise LayoutError("layout: groups have layouts of their own")
    if not 0 < len(kv_caches) <= GROUPS_MAX or not all(isinstance(group, CacheGroup) for group in kv_caches):
        raise LayoutError(f"kv_caches: expected 1 to {GROUPS_MAX} CacheGroups, got {shown(kv_caches)}")
    groups = tuple(kv_caches)
    _check_different([group.name for group in groups], "group")
    for state in (False, True):
        layouts = [one for group in groups if (group.kind is GroupKind.STATE) is state for one in group.layouts]
        _check_different([index for one in layouts for index in one.layer_indices], "layer")
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


def layer_sets(groups: Sequence[CacheGroup], tp_size: int) -> tuple[LayerSet, ...]:
    """All sets of layers, group by group, of a rank of an engine with so many tensor-parallel ranks.

    LayoutError if there are more than peers look at.
    """
    found = tuple(one for at, group in enumerate(groups) for one in sets_of(at, group.sets, tp_size))
    if len(found) > SETS_MAX:
        raise LayoutError(f"kv_caches: layouts and segments of state: {len(found)}, at most {SETS_MAX} in all")
    return found


def sets_of(
    group: int, layers: Iterable[tuple[Mapping[str, LayerCache], CacheLayout | StateLayout]], tp_size: int
) -> Iterator[LayerSet]:
    """The sets of layers of one group."""
    for caches, layout in layers:
        for part in (layout,) if isinstance(layout, CacheLayout) else state_parts(layout, tp_size):
            yield LayerSet(group, caches, part)


def _check_different(values: Sequence[object], what: str) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            hint = "; give each layout its layer_indices" if what == "layer" else ""
            raise LayoutError(f"kv_caches: {what} {value!r} is there twice{hint}")
        seen.add(value)


def check_sets_apart(sets: Sequence[tuple[CacheGroup, Regions]]) -> None:
    """LayoutError if a load of one set of layers may write into another.

    Sets of one group may have their blocks in common rows, each its own bytes of every row. Groups of one pool may lie
    over the same rows, since a block is one group's at a time. Pools share nothing.
    """
    for (ours, regions), (theirs, others) in itertools.combinations(sets, 2):
        for at, where in zip(*np.nonzero(_meet(_extents(regions), _extents(others))), strict=True):
            stride, other_stride = int(regions.strides[at]), int(others.strides[where])
            row, other_row = stride * ours.split, other_stride * theirs.split
            sizes = row - stride + regions.block_size_bytes, other_row - other_stride + others.block_size_bytes
            offset = int(others.bases[where]) - int(regions.bases[at])
            first, last = sizes if offset >= 0 else sizes[::-1]
            if ours.pool == theirs.pool and row == other_row:
                inside = abs(offset) + last <= row
                if inside and (ours.name != theirs.name or abs(offset) >= first):
                    continue
            raise LayoutError(
                f"group {ours.name!r} and group {theirs.name!r} overlap: regions begin {counted(offset, 'byte')} "
                f"apart, block strides are {row} and {counted(other_row, 'byte')}, blocks have {sizes[0]} and "
                f"{sizes[1]}, pools are {ours.pool!r} and {theirs.pool!r}"
            )


def _extents(regions: Regions) -> npt.NDArray[np.int64]:
    """The first byte of each region, and one past its last."""
    bases = regions.bases.astype(np.int64)
    ends = bases + (regions.num_blocks - 1) * regions.strides.astype(np.int64) + regions.block_size_bytes
    return np.stack((bases, ends))


def _meet(ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    meet: npt.NDArray[np.bool_] = (ours[0][:, None] < theirs[1]) & (theirs[0] < ours[1][:, None])
    return meet
