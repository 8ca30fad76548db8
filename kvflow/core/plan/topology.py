"""The topology of a read: two engines' ranks, the layers and KV heads that they share, and who has to be told.

An engine's ranks form a grid: pipeline stages (`pp`) split the layers, tensor-parallel ranks (`tp`) split the KV heads.
Rank r of n holds heads r*H/n to (r+1)*H/n of the model's H. With more ranks than heads each head is held by n/H
neighbours; the latent cache of MLA counts as one head, which all ranks hold. So one rule covers them all: a reader
takes each of its heads once, from one of the ranks that hold it, and the readers of a head spread over its holders.

A rank holds layers of several kinds where the model has them: those of another group (a sliding window beside full
attention) or with another number of heads. Each kind is a `CacheShare` of its own and finds its sources by itself; what
two ranks have in common is the union over the kinds, layer by layer, so the two engines may group their layers
differently.

A lease is released by reports: each reader reports a *share* of the lease as read (`ReportShare`), and when the shares
add up to 1 the lease ends, whatever the parallelism of the readers' engine. The producer needs to know nothing about
its readers. A replica that nobody reads from still has to be released: the first reader of the nearest lower replica
that is read does it. So every rank of the producer has at least one reader that reports to it.

Layers of a draft model (numbers from FIRST_DRAFT_LAYER on) may be on one side only, because only one engine speculates:
they are left out of a load, and the text stays right, since a draft only proposes tokens. So they count nowhere where
engines have to agree: not in the shares that are reported, nor in what a ticket says of its engine. Nothing is lost by
that: who reads from a rank, and how many do, follows from the numbers of ranks alone, whatever heads a layer has, so
whoever reads a draft's layers from a rank reads, and reports, some of the model's own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import msgspec

from kvflow.checks import counted, few
from kvflow.config import RANKS_MAX, Config
from kvflow.core.bounds import Count, Fact, Layers, RankCount, RankIndex, Size
from kvflow.core.cache.layout import PLAIN, CacheLayout
from kvflow.core.cache.state import StatePart
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER


class Rank(NamedTuple):
    """A rank's place in its engine."""

    dp: Count
    pp: Count
    tp: Count

    def __str__(self) -> str:
        return f"dp {self.dp} pp {self.pp} tp {self.tp}"

    @classmethod
    def of(cls, config: Config) -> Rank:
        """The rank that a config describes.

        Args:
            config: its dp_rank, pp_rank and tp_rank are taken.

        Returns:
            That rank.
        """
        return cls(config.dp_rank, config.pp_rank, config.tp_rank)


class Parallelism(NamedTuple):
    """The parallelism of an engine, as far as its tickets say; the fields are those of a `CacheShare`."""

    tp_size: int
    pp_size: int
    block_size: int
    kv_heads: int
    model_kv_heads: int
    more: tuple[tuple[int, int, int], ...] = ()
    """(block_size, kv_heads, model_kv_heads) of the further kinds of layers, if there are several."""

    def ranks(self, dp_rank: int) -> list[Rank]:
        """All ranks of one replica."""
        return [Rank(dp_rank, *place) for place in itertools.product(range(self.pp_size), range(self.tp_size))]

    @property
    def kinds(self) -> Iterator[dict[str, int]]:
        """The cut of each kind of layers, as fields of a `CacheShare`."""
        for kind in (self[2:5], *self.more):
            yield dict(zip(self._fields, (*self[:2], *kind), strict=False))


class CacheShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one rank in its model's layers of one kind, and how its engine is cut. Two sides may differ in all.

    `kv_heads` is this rank's; `model_kv_heads` is the model's, or 0 if the engine did not say. Layers of one kind have
    their blocks in common (`group`) and as many heads as each other.
    """

    tp_rank: RankIndex
    tp_size: RankCount
    pp_rank: RankIndex
    pp_size: RankCount
    layers: Layers
    kv_heads: Size
    model_kv_heads: Count
    latent: bool
    block_size: Size
    dtype: Fact = ""
    kv_format: Fact = PLAIN
    group: Count = 0
    """Index of the rank's group whose block ids say where the layers' blocks are."""
    part: Fact = ""
    """The segment and tensor of state per request; its units are counted as heads are."""

    @property
    def plain(self) -> bool:
        """True if its bytes are values at strides of tokens and heads, and nothing else."""
        return self.kv_format == PLAIN and not self.part

    @property
    def kv_head_slots(self) -> int:
        """KV heads over all tensor-parallel ranks, replicas counted."""
        return self.kv_heads * self.tp_size


def cache_share_of(
    layout: CacheLayout | StatePart, config: Config, *, model_kv_heads: int | None, group: int = 0
) -> CacheShare:
    """The share of the rank that a config describes in this cache, or in a segment of its layers' state."""
    return CacheShare(
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        layers=layout.layer_indices,
        kv_heads=layout.num_kv_heads,
        model_kv_heads=model_kv_heads or 0,
        latent=layout.latent,
        block_size=layout.block_size,
        dtype=layout.dtype,
        kv_format=layout.kv_format,
        group=group,
        part=layout.name if isinstance(layout, StatePart) else "",
    )


def of_model(shares: Sequence[CacheShare]) -> Sequence[CacheShare]:
    """Return the shares that hold layers of the model itself, and not of a draft; all if none does."""
    return [share for share in shares if min(share.layers) < FIRST_DRAFT_LAYER] or shares


def parallelism_of(shares: Sequence[CacheShare]) -> Parallelism:
    """The parallelism of the engine of a rank that holds these."""
    first = shares[0]
    kinds = dict.fromkeys((one.block_size, one.kv_heads, one.model_kv_heads) for one in of_model(shares))
    return Parallelism(first.tp_size, first.pp_size, *next(iter(kinds)), tuple(kinds)[1:])


class HeadSource(NamedTuple):
    """A tensor-parallel rank of the producer, as a rank of the consumer sees it."""

    tp_rank: int
    local_start: int
    """First of our KV heads that come from there."""
    remote_start: int
    """Index of its first KV head to read."""
    heads: int
    """Heads to read; 0 if we only report to it."""
    reporters: int
    """Ranks of our stage that report to it, this one included."""


class ReportShare(NamedTuple):
    """Share of a rank's lease that we report as read, as a fraction. 0/1: this rank needs no release from us."""

    numerator: int
    denominator: int


def kv_heads_of_model(ours: CacheShare, theirs: CacheShare) -> int:
    """The model's KV heads, from what both sides know of them; 1 for MLA, whose latent is held whole by every rank.

    Said by one side, it is that. Else each side's slots (heads times ranks) are a multiple of it, and the smaller
    number is right: with one head on each rank of both sides every multiple of the truth leads to the same bytes.
    """
    if ours.latent:
        return 1
    return ours.model_kv_heads or theirs.model_kv_heads or min(ours.kv_head_slots, theirs.kv_head_slots)


def stages_max(ours: Sequence[CacheShare]) -> int:
    """Largest number of pipeline stages of an engine with our model: each has one layer at least.

    A rank of one stage knows all layers; one of several knows its own only.
    """
    return len({layer for share in ours for layer in share.layers}) if ours[0].pp_size == 1 else RANKS_MAX


def heads_held(share: CacheShare, kv_heads: int) -> range:
    """KV heads of the model's `kv_heads` that a rank holds; one for MLA's latent."""
    return range(1) if share.latent else _heads(share.tp_rank, share.tp_size, kv_heads)


def layers_of(shares: Sequence[CacheShare]) -> dict[str, tuple[int, ...]]:
    """Layers that a rank holds, by the part of state that it holds of them."""
    found: dict[str, tuple[int, ...]] = {}
    for share in shares:
        found[share.part] = found.get(share.part, ()) + share.layers
    return found


def in_common(
    ours: Sequence[CacheShare], theirs: Sequence[CacheShare]
) -> Iterator[tuple[int, int, CacheShare, CacheShare]]:
    """(our position, their position, ours, theirs) of the shares that have layers in common."""
    for at, mine in enumerate(ours):
        for where, other in enumerate(theirs):
            if mine.part == other.part and not set(mine.layers).isdisjoint(other.layers):
                yield at, where, mine, other


def differences(ours: Sequence[CacheShare], theirs: Sequence[CacheShare]) -> list[str]:
    """Reasons why blocks cannot be planned between two ranks, one "field: ours X, theirs Y" each; empty if they can."""
    pairs = [pair[2:] for pair in in_common(ours, theirs)] or [(ours[0], theirs[0])]
    found = [_apart("tp_size", ours[0].tp_size, theirs[0].tp_size)]
    found += (_apart("block_size", mine.block_size, other.block_size) for mine, other in pairs)
    found += _layer_differences(ours, theirs)
    found += (_head_difference(mine, other) for mine, other in pairs)
    for name in ("latent", "dtype", "kv_format"):
        found += (_difference(name, getattr(mine, name), getattr(other, name)) for mine, other in pairs)
    return [problem for problem in dict.fromkeys(found) if problem]


def _difference(name: str, ours: object, theirs: object) -> str:
    return "" if ours == theirs else f"{name}: ours {ours!r}, theirs {theirs!r}"


def _apart(name: str, ours: int, theirs: int) -> str:
    return "" if _divides(ours, theirs) else f"{name}: ours {ours}, theirs {theirs}: neither divides the other"


def _layer_differences(ours: Sequence[CacheShare], theirs: Sequence[CacheShare]) -> Iterator[str]:
    if ours[0].pp_size == theirs[0].pp_size == 1:
        all_ours, all_theirs = layers_of(ours), layers_of(theirs)
        for part in all_ours | all_theirs:
            mine, other = all_ours.get(part, ()), all_theirs.get(part, ())
            if apart := ({*mine} ^ {*other}) - left_out(mine, other):
                of_part, hint = f" with {part}" if part else "", _hint(apart, {*mine} & {*other})
                yield f"layers{of_part}: ours {_layers_text(mine)}, theirs {_layers_text(other)}{hint}"


def left_out(ours: Collection[int], theirs: Collection[int]) -> frozenset[int]:
    """Return the layers of a draft model that only one of two sides has: loads leave them out.

    None are, unless both have layers of the model itself in common.
    """
    if min({*ours} & {*theirs}, default=FIRST_DRAFT_LAYER) >= FIRST_DRAFT_LAYER:
        return frozenset()
    return frozenset(layer for layer in {*ours} ^ {*theirs} if layer >= FIRST_DRAFT_LAYER)


_HINT = (
    "; if they are of a draft model, mark them on both sides: by a name such as 'draft.0' or 'mtp.0', or by "
    f"layer_indices from {FIRST_DRAFT_LAYER} on"
)


def _hint(apart: Collection[int], common: Collection[int]) -> str:
    """Say how a draft's layers are marked, if layers that one side lacks may be some: behind all others, not marked.

    Unmarked they are never left out: they may as well be layers that one side has forgotten.
    """
    return _HINT if common and max(common) < min(apart) and max(apart) < FIRST_DRAFT_LAYER else ""


def _head_difference(ours: CacheShare, theirs: CacheShare) -> str:
    if ours.latent or theirs.latent:
        return ""
    if ours.model_kv_heads and theirs.model_kv_heads and ours.model_kv_heads != theirs.model_kv_heads:
        return f"model's {_heads_word(ours)}: ours {ours.model_kv_heads}, theirs {theirs.model_kv_heads}"
    heads = kv_heads_of_model(ours, theirs)
    if all(_divides(side.tp_size, heads) and side.kv_heads == max(heads // side.tp_size, 1) for side in (ours, theirs)):
        return ""
    ours_text, theirs_text = (f"{side.kv_heads} on each of {counted(side.tp_size, 'rank')}" for side in (ours, theirs))
    of_model = f", where one side says that the model has {heads}" if ours_text == theirs_text else ""
    return f"{_heads_word(ours)}: ours {ours_text}, theirs {theirs_text}{of_model}"


def _heads_word(share: CacheShare) -> str:
    return f"units of {share.part}" if share.part else "num_kv_heads"


@lru_cache(maxsize=4096)
def head_sources(tp_rank: int, tp_size: int, their_tp_size: int, kv_heads: int) -> tuple[HeadSource, ...]:
    """Producer's ranks that rank `tp_rank` of `tp_size` reads from or reports to, in order.

    Sizes are such that `differences` found nothing wrong with them.
    """
    mine = _heads(tp_rank, tp_size, kv_heads)
    holders = range(mine.start * their_tp_size // kv_heads, -(-mine.stop * their_tp_size // kv_heads))
    found = []
    for theirs in holders:
        reporters, reading = _reporters(theirs, tp_size, their_tp_size, kv_heads)
        if tp_rank in reporters:
            held = _heads(theirs, their_tp_size, kv_heads)
            start = max(mine.start, held.start)
            count = min(mine.stop, held.stop) - start if reading else 0
            starts = (start - mine.start, start - held.start) if reading else (0, 0)
            found.append(HeadSource(theirs, *starts, count, len(reporters)))
    return tuple(found)


def sources_of(ours: CacheShare, theirs: CacheShare) -> tuple[HeadSource, ...]:
    """The tensor-parallel ranks of each of their stages that we read from or report to."""
    return head_sources(ours.tp_rank, ours.tp_size, theirs.tp_size, kv_heads_of_model(ours, theirs))


def source_at(ours: CacheShare, theirs: CacheShare) -> HeadSource | None:
    """Source of ours that is the rank with the share `theirs`; None if we neither read from it nor report to it."""
    return next((one for one in sources_of(ours, theirs) if one.tp_rank == theirs.tp_rank), None)


def report_share(ours: Sequence[CacheShare], theirs: Sequence[CacheShare]) -> ReportShare:
    """Share that we report to a rank when we are done with its lease.

    Counted in layers, each divided by its reporters: the stages of one engine split its layers, so the shares of all
    who report to a rank add up to 1. A rank that has no layer of ours is released by others. Layers of a draft model,
    which readers may lack, are not counted, unless the rank has no others.
    """
    held = {layer for share in theirs for layer in share.layers}
    counted = {layer for layer in held if layer < FIRST_DRAFT_LAYER} or held
    share = Fraction(0)
    for _, _, mine, other in in_common(ours, theirs):
        source = source_at(mine, other)
        if source is not None:
            share += Fraction(len(counted & {*mine.layers} & {*other.layers}), source.reporters)
    total = sum(len(counted & {*other.layers}) for other in theirs)
    return ReportShare(*(share / total).as_integer_ratio())


def missing_layers(ours: Sequence[int], stages: Sequence[Sequence[int]], *, whole: bool = False) -> str:
    """The fault of a producer whose stages hold these layers, for a rank that needs `ours`; "" if nothing.

    `whole` says that ours are all layers of the model.
    """
    if len(stages) == 1 and stages[0] == ours:
        return ""
    held = Counter(layer for layers in stages for layer in layers)
    common, drafts = held.keys() & {*ours}, left_out(ours, held)
    problems = {
        "no stage holds {}": [layer for layer in ours if layer not in held and layer not in drafts],
        "{} held twice": [layer for layer in ours if held[layer] > 1],
        "ours are all, but there are {}": sorted(held.keys() - {*ours} - drafts) if whole else [],
    }
    found = next(((text, layers) for text, layers in problems.items() if layers), None)
    if found is None:
        return ""
    what, hint = found[0].format(_layers_text(found[1])), _hint(found[1], common) if whole else ""
    return f"layers: ours {_layers_text(ours)}, theirs {_layers_text(list(held.elements()))}: {what}{hint}"


def _heads(tp_rank: int, tp_size: int, kv_heads: int) -> range:
    """The model's KV heads that a rank holds."""
    if tp_size <= kv_heads:
        each = kv_heads // tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)
    head = tp_rank * kv_heads // tp_size
    return range(head, head + 1)


def _reporters(theirs: int, tp_size: int, their_tp_size: int, kv_heads: int) -> tuple[range, bool]:
    """The ranks that report to rank `theirs`, and whether they read from it, too.

    The readers of a head are spread evenly over its holders, which are replicas of each other: reader j of n takes
    holder j*m/n of m, so that rank i reads from rank i if the sizes are equal. A replica that nobody reads from is
    released by the first reader of the nearest lower one that is read.
    """
    held = _heads(theirs, their_tp_size, kv_heads)
    readers, holders = max(tp_size // kv_heads, 1), max(their_tp_size // kv_heads, 1)
    each = max(kv_heads // tp_size, 1)  # heads of a rank of ours
    sharers = range(held.start * readers // each, -(-held.stop * readers // each))  # ours with a head in common
    holder = theirs % holders
    last = min(readers - 1, ((holder + 1) * readers - 1) // holders)  # the last reader of it or of one before it
    served = last * holders // readers
    first = -(-served * readers // holders)
    if holders == 1:
        return sharers, True
    if served == holder:
        return range(sharers.start + first, sharers.start + last + 1), True
    return range(sharers.start + first, sharers.start + first + 1), False


def _divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def _layers_text(layers: Sequence[int]) -> str:
    """Layer numbers in short: "4 (0, 1, 2, 3)"."""
    return f"{len(layers)} ({few(sorted(layers), 6)})"
