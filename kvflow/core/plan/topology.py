"""The topology of a read: which ranks of two engines share layers and KV heads, and which ranks report to which.

Pipeline stages (`pp`) split an engine's layers, tensor-parallel ranks (`tp`) its KV heads. Rank r of n holds heads
r*H/n to (r+1)*H/n of the model's H heads. If ranks outnumber heads, n/H neighbours hold the same head. The latent cache
of MLA counts as one head, which all ranks hold. So one rule covers all cases: a reader reads each of its heads once,
from one of the producer's ranks that hold the head. If several ranks hold a head, its readers are spread evenly over
them.

A rank may hold layers of several kinds: of different groups (a sliding window beside full attention), or with different
numbers of heads. Each kind is a `CacheShare`, and each may be read from other ranks. Ranks are compared layer by layer,
so the two engines may group their layers differently.

With decode context parallelism, tokens of a latent cache are *sharded*: each block has tokens on every tensor-parallel
rank (`Shard`). A reader then reads from all ranks that hold tokens which it holds, too.

Each reader reports a *share* of the lease as read (`ReportShare`); the lease ends when the shares add up to 1. If
several producer ranks hold the same heads, a rank may have no reader, but still needs a report: that of the first
reader of the nearest lower rank with the same heads that has readers.

One side may have layers of a draft model (with numbers from FIRST_DRAFT_LAYER on) that the other side lacks. A load
leaves them out; the generated text stays right, since a draft only proposes tokens. So these layers do not count in
reported shares, nor in the parallelism that a ticket states. No report is lost: which ranks read from a rank follows
from the numbers of ranks alone, so a rank that reads a draft's layers also reads, and reports, layers of the main
model.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import msgspec

from kvflow.checks import counted, first_few
from kvflow.config import RANKS_MAX, Config
from kvflow.core.bounds import Count, Fact, Layers, RankCount, RankIndex, Size
from kvflow.core.cache.layout import PLAIN, CacheLayout
from kvflow.core.cache.state import SegmentLayout
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER
from kvflow.errors import LayoutError


class Rank(NamedTuple):
    """A rank of an engine, by three indices from 0: data-parallel replica, pipeline stage, tensor-parallel rank."""

    dp: Count
    pp: Count
    tp: Count

    def __str__(self) -> str:
        return f"dp {self.dp} pp {self.pp} tp {self.tp}"

    @classmethod
    def of(cls, config: Config) -> Rank:
        """Return the rank that a config describes.

        Args:
            config: settings, of which only dp_rank, pp_rank and tp_rank are used.

        Returns:
            The rank.
        """
        return cls(config.dp_rank, config.pp_rank, config.tp_rank)


class Parallelism(NamedTuple):
    """The parallelism of an engine, as its tickets state it.

    The fields mean the same as in `CacheShare`. Layers with equal block_size, kv_heads and model_kv_heads are of one
    kind: the fields describe the first kind, `more` the others.
    """

    tp_size: int
    pp_size: int
    block_size: int
    kv_heads: int
    model_kv_heads: int
    more: tuple[tuple[int, int, int], ...] = ()
    """(block_size, kv_heads, model_kv_heads) of each further kind of layers."""
    sharded: bool = False

    def ranks(self, dp_rank: int) -> list[Rank]:
        return [Rank(dp_rank, *place) for place in itertools.product(range(self.pp_size), range(self.tp_size))]

    @property
    def kinds(self) -> Iterator[dict[str, int]]:
        """Yield a dict for each kind of layers: tp_size, pp_size, block_size, kv_heads, model_kv_heads, sharded."""
        for kind in (self[2:5], *self.more):
            yield dict(zip(self._fields, (*self[:2], *kind), strict=False)) | {"sharded": self.sharded}


class Shard(NamedTuple):
    """The tokens of a block that one rank holds: the part `rank` of `ranks` equal parts of consecutive tokens."""

    rank: int
    ranks: int


WHOLE = Shard(0, 1)
"""All tokens of a block."""


class CacheShare(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of one kind that one rank holds, and the parallelism of the rank's engine.

    Layers of one kind have the same block table (`group`) and number of heads. The two sides of a load may differ in
    any field; `differences` decides whether a load is possible.
    """

    tp_rank: RankIndex
    tp_size: RankCount
    pp_rank: RankIndex
    pp_size: RankCount
    layers: Layers
    """Index in the model of each layer."""
    kv_heads: Size
    """Number of KV heads that this rank holds in these layers."""
    model_kv_heads: Count
    """KV heads of the whole model in these layers; 0 if not stated."""
    latent: bool
    """True if the layers hold one latent vector per token in place of K and V (MLA)."""
    block_size: Size
    """Number of tokens that a block id stands for."""
    dtype: Fact = ""
    kv_format: Fact = PLAIN
    group: Count = 0
    """Index of the rank's group that these layers belong to."""
    part: Fact = ""
    """Name of the segment (`cache.state.Segment`) if the layers hold state per request; the segment's units count as
    heads. "" for layers with a KV cache."""
    sharded: bool = False
    """True if the tokens of a block are sharded over the tensor-parallel ranks."""

    @property
    def shard(self) -> Shard:
        return Shard(self.tp_rank, self.tp_size) if self.sharded else WHOLE

    @property
    def held_tokens(self) -> int:
        """Number of tokens of a block that one rank holds."""
        return self.block_size // self.shard.ranks

    @property
    def plain(self) -> bool:
        """True for a KV cache of plain values, so that single tokens and heads can be read."""
        return self.kv_format == PLAIN and not self.part

    @property
    def kv_head_slots(self) -> int:
        """Sum of the KV heads of all tensor-parallel ranks; a head that several ranks hold counts once for each."""
        return self.kv_heads * self.tp_size


def cache_share_of(
    layout: CacheLayout | SegmentLayout,
    config: Config,
    *,
    model_kv_heads: int | None,
    group: int = 0,
    sharded: bool = False,
) -> CacheShare:
    """Return the cache share of the rank that `config` describes, for the layers that `layout` describes.

    `group`: index of the layers' group. `sharded`: the tokens of a block are sharded over the tensor-parallel ranks.
    """
    return CacheShare(
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        layers=layout.layer_indices,
        kv_heads=layout.kv_heads,
        model_kv_heads=model_kv_heads or 0,
        latent=layout.latent,
        block_size=layout.block_size * (config.tp_size if sharded else 1),
        dtype=layout.dtype,
        kv_format=layout.kv_format,
        group=group,
        part=layout.name if isinstance(layout, SegmentLayout) else "",
        sharded=sharded,
    )


def check_heads(shares: Sequence[CacheShare]) -> None:
    """Raise LayoutError if the rank with `shares` has another number of KV heads than the model's divided by `tp_size`.

    With such a rank every load would be refused. Layers of a draft model, which a load may leave out, are not checked.
    """
    for share in model_shares(shares):
        heads = share.model_kv_heads
        if heads and not share.latent and not _holds(share, heads):
            ranks = counted(share.tp_size, "rank")
            raise LayoutError(f"{_heads_word(share)}: {share.kv_heads} on each of {ranks}, but the model has {heads}")


def _holds(share: CacheShare, heads: int) -> bool:
    """Return True if each rank of an engine with `heads` KV heads in its model has as many of them as `share` says."""
    return _divides(share.tp_size, heads) and share.kv_heads == max(heads // share.tp_size, 1)


def model_shares(shares: Sequence[CacheShare]) -> Sequence[CacheShare]:
    """Return the shares with layers of the main model or, if all layers are of a draft model, all shares."""
    return [share for share in shares if min(share.layers) < FIRST_DRAFT_LAYER] or shares


def parallelism_of(shares: Sequence[CacheShare]) -> Parallelism:
    """Return the parallelism of an engine. `shares`: all cache shares of one rank, no matter which."""
    first = shares[0]
    kinds = dict.fromkeys((share.block_size, share.kv_heads, share.model_kv_heads) for share in model_shares(shares))
    return Parallelism(first.tp_size, first.pp_size, *next(iter(kinds)), tuple(kinds)[1:], first.sharded)


class HeadSource(NamedTuple):
    """A tensor-parallel rank of the producer, and the KV heads that a reader reads from that rank."""

    tp_rank: int
    local_start: int
    """Index of the first head to read among the reader's KV heads."""
    remote_start: int
    """Index of the first head to read among the KV heads of the producer's rank."""
    heads: int
    """Number of heads to read; 0 if the reader only has to report to the producer's rank."""
    reporters: int
    """Number of ranks in the reader's pipeline stage, the reader included, that report their reads to the producer's
    rank."""


class ReportShare(NamedTuple):
    """The fraction of a producer rank's lease that one reader reports as read. If 0, the reader need not report."""

    numerator: int
    denominator: int


def kv_heads_of_model(local: CacheShare, remote: CacheShare) -> int:
    """Return the number of the model's KV heads; 1 for MLA, because every rank holds the whole latent vector.

    `local`, `remote`: cache share of a local rank and of a producer's rank. If neither states the number, return the
    smaller of the two `kv_head_slots`. If both sides have more ranks than the model has heads, this is too large, but
    it is a multiple of the number, and the planned reads are the same.
    """
    if local.latent:
        return 1
    return local.model_kv_heads or remote.model_kv_heads or min(local.kv_head_slots, remote.kv_head_slots)


def stages_max(local: Sequence[CacheShare]) -> int:
    """Return an upper bound of the number of pipeline stages that an engine with the local model can have.

    `local`: cache shares of the local rank. The bound is the number of layers or, if the local engine has several
    stages and the rank does not know all layers, RANKS_MAX.
    """
    return len({layer for share in local for layer in share.layers}) if local[0].pp_size == 1 else RANKS_MAX


def heads_held(share: CacheShare, kv_heads: int) -> range:
    """Return which of the model's `kv_heads` heads the rank with `share` holds, as indices. For MLA: range(1)."""
    return range(1) if share.latent else _heads(share.tp_rank, share.tp_size, kv_heads)


def layers_of(shares: Sequence[CacheShare]) -> dict[str, tuple[int, ...]]:
    """Return a rank's layer indices by segment name; the key "" stands for layers with a KV cache."""
    layers: dict[str, tuple[int, ...]] = {}
    for share in shares:
        layers[share.part] = layers.get(share.part, ()) + share.layers
    return layers


def common_shares(
    local: Sequence[CacheShare], remote: Sequence[CacheShare]
) -> Iterator[tuple[int, int, CacheShare, CacheShare]]:
    """Yield the pairs of a local rank's and a producer rank's cache shares that have a layer in common.

    Each is (index in `local`, index in `remote`, local share, remote share).
    """
    for index, mine in enumerate(local):
        for remote_index, other in enumerate(remote):
            if mine.part == other.part and not set(mine.layers).isdisjoint(other.layers):
                yield index, remote_index, mine, other


def differences(local: Sequence[CacheShare], remote: Sequence[CacheShare]) -> list[str]:
    """Return why no load between two ranks is possible, as texts "field: ours X, theirs Y"; [] if a load is possible.

    `local`, `remote`: all cache shares of the local rank and of the producer's.
    """
    pairs = [pair[2:] for pair in common_shares(local, remote)] or [(local[0], remote[0])]
    problems = [_divisibility_problem("tp_size", local[0].tp_size, remote[0].tp_size)]
    problems += (_divisibility_problem("block_size", mine.held_tokens, other.held_tokens) for mine, other in pairs)
    problems += _layer_differences(local, remote)
    problems += (_head_difference(mine, other) for mine, other in pairs)
    for name in ("latent", "dtype", "kv_format"):
        problems += (_difference(name, getattr(mine, name), getattr(other, name)) for mine, other in pairs)
    return [problem for problem in dict.fromkeys(problems) if problem]


def _difference(name: str, local: object, remote: object) -> str:
    return "" if local == remote else f"{name}: ours {local!r}, theirs {remote!r}"


def _divisibility_problem(name: str, local: int, remote: int) -> str:
    return "" if _divides(local, remote) else f"{name}: ours {local}, theirs {remote}: neither divides the other"


def _layer_differences(local: Sequence[CacheShare], remote: Sequence[CacheShare]) -> Iterator[str]:
    # A stage lacks the layers of the others: of a pipeline only all stages together show what is missing.
    if local[0].pp_size == remote[0].pp_size == 1:
        all_local, all_remote = layers_of(local), layers_of(remote)
        for segment in all_local | all_remote:
            mine, other = all_local.get(segment, ()), all_remote.get(segment, ())
            if apart := ({*mine} ^ {*other}) - layers_left_out(mine, other):
                of_segment, hint = f" with {segment}" if segment else "", _hint(apart, {*mine} & {*other})
                yield f"layers{of_segment}: ours {_layers_text(mine)}, theirs {_layers_text(other)}{hint}"


def layers_left_out(local: Collection[int], remote: Collection[int]) -> frozenset[int]:
    """Return the layers of a draft model that only one side has, which loads leave out.

    `local`, `remote`: layer indices of the two sides. Return none if they have no layer of the main model in common.
    """
    if min({*local} & {*remote}, default=FIRST_DRAFT_LAYER) >= FIRST_DRAFT_LAYER:
        return frozenset()
    return frozenset(layer for layer in {*local} ^ {*remote} if layer >= FIRST_DRAFT_LAYER)


_HINT = (
    "; if they are of a draft model, mark them on both sides: by a name such as 'draft.0' or 'mtp.0', or by "
    f"layer_indices from {FIRST_DRAFT_LAYER} on"
)


def _hint(apart: Collection[int], common: Collection[int]) -> str:
    """Return a hint, for a message, to mark the layers `apart` as a draft model's; "" if they cannot be such layers.

    `apart`: layers that only one side has. `common`: layers that both sides have. The layers `apart` can be a draft
    model's if they come after all `common` layers, and none is marked yet by an index from FIRST_DRAFT_LAYER on. Loads
    leave out only marked layers.
    """
    return _HINT if common and max(common) < min(apart) and max(apart) < FIRST_DRAFT_LAYER else ""


def _head_difference(local: CacheShare, remote: CacheShare) -> str:
    if local.latent or remote.latent:
        return ""
    if local.model_kv_heads and remote.model_kv_heads and local.model_kv_heads != remote.model_kv_heads:
        return f"model's {_heads_word(local)}: ours {local.model_kv_heads}, theirs {remote.model_kv_heads}"
    heads = kv_heads_of_model(local, remote)
    if _holds(local, heads) and _holds(remote, heads):
        return ""
    texts = tuple(f"{side.kv_heads} on each of {counted(side.tp_size, 'rank')}" for side in (local, remote))
    of_model = f", where one side says that the model has {heads}" if texts[0] == texts[1] else ""
    return f"{_heads_word(local)}: ours {texts[0]}, theirs {texts[1]}{of_model}"


def _heads_word(share: CacheShare) -> str:
    return f"units of {share.part}" if share.part else "num_kv_heads"


@lru_cache(maxsize=4096)  # bounded, since the sizes are a ticket's, which may be forged (I8)
def head_sources(tp_rank: int, tp_size: int, remote_tp_size: int, kv_heads: int) -> tuple[HeadSource, ...]:
    """Return the ranks of a producer that a reader reads from or reports to, with the heads to read, ordered by rank.

    The reader is tensor-parallel rank `tp_rank` of `tp_size`, the producer has `remote_tp_size` such ranks, and the
    model `kv_heads` KV heads. `differences` must have accepted these sizes.
    """
    mine = _heads(tp_rank, tp_size, kv_heads)
    holders = range(mine.start * remote_tp_size // kv_heads, -(-mine.stop * remote_tp_size // kv_heads))
    sources = []
    for holder in holders:
        reporters, reading = _reporters(holder, tp_size, remote_tp_size, kv_heads)
        if tp_rank in reporters:
            held = _heads(holder, remote_tp_size, kv_heads)
            start = max(mine.start, held.start)
            count = min(mine.stop, held.stop) - start if reading else 0
            starts = (start - mine.start, start - held.start) if reading else (0, 0)
            sources.append(HeadSource(holder, *starts, count, len(reporters)))
    return tuple(sources)


def sources_of(local: CacheShare, remote: CacheShare) -> tuple[HeadSource, ...]:
    """Return the tensor-parallel ranks of a producer that the local rank reads from or reports to.

    `remote`: cache share of any rank of the producer. The result is valid for each pipeline stage of the producer.
    """
    if remote.sharded:
        return _shard_sources(local, remote)
    return head_sources(local.tp_rank, local.tp_size, remote.tp_size, kv_heads_of_model(local, remote))


def _shard_sources(local: CacheShare, remote: CacheShare) -> tuple[HeadSource, ...]:
    """Return the ranks of a producer with sharded tokens that the local rank reads from: those with tokens in common.

    Each of these ranks has equally many readers, since the tokens of a block on one rank are as many as on the other
    side, or a multiple.
    """
    shards = [Shard(rank, remote.tp_size) for rank in range(remote.tp_size)]
    holders = [shard for shard in shards if _shards_meet(local.shard, local.held_tokens, shard, remote.held_tokens)]
    readers = [Shard(rank, local.tp_size) if local.sharded else WHOLE for rank in range(local.tp_size)]
    reporters = sum(_shards_meet(reader, local.held_tokens, holders[0], remote.held_tokens) for reader in readers)
    return tuple(HeadSource(shard.rank, 0, 0, 1, reporters) for shard in holders)


def _shards_meet(local: Shard, size: int, remote: Shard, remote_size: int) -> bool:
    """Return True if some token of some prompt is in both shards, of `size` and of `remote_size` tokens.

    The shards of consecutive blocks are `local.ranks * size` and `remote.ranks * remote_size` tokens apart. So the
    distances between the starts of two shards are one distance plus any multiple of `period`.
    """
    period = math.gcd(local.ranks * size, remote.ranks * remote_size)
    distance = (local.rank * size - remote.rank * remote_size) % period
    return distance < remote_size or distance > period - size


def source_at(local: CacheShare, remote: CacheShare) -> HeadSource | None:
    """Return which heads the local rank, with share `local`, reads from the producer's rank with share `remote`.

    None if the local rank neither reads from that rank nor reports to it.
    """
    return next((source for source in sources_of(local, remote) if source.tp_rank == remote.tp_rank), None)


def report_share(local: Sequence[CacheShare], remote: Sequence[CacheShare]) -> ReportShare:
    """Return the fraction of a producer rank's lease that the local rank reports as read; 0 if no layer is common.

    `local`, `remote`: all cache shares of the local rank and of the producer's rank. Each layer that both have counts
    1, divided by the number of reader ranks that report it; the sum is divided by the number of layers of the
    producer's rank. So the fractions of all readers add up to 1. Layers of a draft model, which readers may lack, do
    not count unless the producer's rank has no others.
    """
    held = {layer for share in remote for layer in share.layers}
    counting = {layer for layer in held if layer < FIRST_DRAFT_LAYER} or held
    share = Fraction(0)  # exact: a lease ends when its readers' shares are 1, which a sum of floats may miss
    for _, _, mine, other in common_shares(local, remote):
        source = source_at(mine, other)
        if source is not None:
            share += Fraction(len(counting & {*mine.layers} & {*other.layers}), source.reporters)
    total = sum(len(counting & {*other.layers}) for other in remote)
    return ReportShare(*(share / total).as_integer_ratio())


def missing_layers(local: Sequence[int], stages: Sequence[Sequence[int]], *, whole: bool = False) -> str:
    """Return why the local rank cannot read all its layers from a producer's pipeline stages; "" if it can.

    `local`: indices of the local layers; if `whole`, these are all layers of the model. `stages`: layer indices of each
    stage of the producer.
    """
    if len(stages) == 1 and stages[0] == local:
        return ""
    held = Counter(layer for layers in stages for layer in layers)
    common, drafts = held.keys() & {*local}, layers_left_out(local, held)
    problems = {
        "no stage holds {}": [layer for layer in local if layer not in held and layer not in drafts],
        "{} held twice": [layer for layer in local if held[layer] > 1],
        "ours are all, but there are {}": sorted(held.keys() - {*local} - drafts) if whole else [],
    }
    for problem, layers in problems.items():
        if layers:
            hint = _hint(layers, common) if whole else ""
            sides = f"ours {_layers_text(local)}, theirs {_layers_text(list(held.elements()))}"
            return f"layers: {sides}: {problem.format(_layers_text(layers))}{hint}"
    return ""


def _heads(tp_rank: int, tp_size: int, kv_heads: int) -> range:
    """Return which of the model's `kv_heads` heads tensor-parallel rank `tp_rank` of `tp_size` holds, as indices."""
    if tp_size <= kv_heads:
        each = kv_heads // tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)
    head = tp_rank * kv_heads // tp_size
    return range(head, head + 1)


def _reporters(remote_rank: int, tp_size: int, remote_tp_size: int, kv_heads: int) -> tuple[range, bool]:
    """Return the reader's ranks that report to the producer's `remote_rank`, and whether they also read from it.

    All are tensor-parallel ranks. Say that m ranks of the producer, holders 0 to m-1, hold the same heads, and n ranks
    of the reader, readers 0 to n-1, need these heads. Then reader j reads from holder j*m/n, rounded down. So rank i
    reads from rank i if the sizes are equal. A holder without a reader gets its report from the first reader of the
    nearest lower holder that has readers.
    """
    held = _heads(remote_rank, remote_tp_size, kv_heads)
    readers, holders = max(tp_size // kv_heads, 1), max(remote_tp_size // kv_heads, 1)
    each = max(kv_heads // tp_size, 1)  # heads of one reader rank
    sharers = range(held.start * readers // each, -(-held.stop * readers // each))  # reader ranks with a head in common
    holder = remote_rank % holders
    last = min(readers - 1, ((holder + 1) * readers - 1) // holders)  # last reader of this holder, or of one before it
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
    """Return text for a message: the number of layers, then the smallest indices, such as "4 (0, 1, 2, 3)"."""
    return f"{len(layers)} ({first_few(sorted(layers), 6)})"
