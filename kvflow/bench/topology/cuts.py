"""Who holds what: one model's KV cache, how a rank of either side cuts it, and the cases that are compared. Pure.

The model has the cache of the common 7B models without grouped queries: 32 KV heads of 128 fp16 elements. Rank 1 of 4
holds 8 heads, so K or V of one block of 16 tokens is 32 KiB, and what it reads of a larger rank begins in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvflow.bench.cache import CacheShape, Order

MODEL_KV_HEADS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One rank's cache and how its runtime is configured."""

    tp_rank: int
    tp_size: int
    order: Order = Order.HND
    block_size: int = 16
    staged: bool = False
    scratch: bool = True

    @property
    def kv_heads(self) -> int:
        return MODEL_KV_HEADS // self.tp_size

    def shape(self, *, layers: int, tokens: int) -> CacheShape:
        """Its cache of so many tokens."""
        return CacheShape(
            layers=layers,
            blocks=tokens // self.block_size,
            kv_heads=self.kv_heads,
            block_size=self.block_size,
            order=self.order,
            first_head=self.tp_rank * self.kv_heads,
        )

    @property
    def engine_id(self) -> str:
        """The same for all ranks of an engine."""
        extras = f"{'-staged' if self.staged else ''}{'' if self.scratch else '-direct'}"
        return f"tp{self.tp_size}-{self.order.lower()}{self.block_size}{extras}"

    @property
    def name(self) -> str:
        return f"{self.engine_id} rank {self.tp_rank}"

    def __str__(self) -> str:
        extras = f"{' staged' if self.staged else ''}{'' if self.scratch else ' no scratch'}"
        return f"{self.kv_heads} heads {self.order} {self.block_size}{extras}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one row measures: `consumer` loads from `producers`, ranks of one engine, all that it needs."""

    label: str
    consumer: Cut
    producers: tuple[Cut, ...]
    baseline: str = ""
    """The label of the case that it is compared with; empty for one that others are compared with."""

    @property
    def is_head_slice(self) -> bool:
        """Whether some heads of each HND block are read, and nothing else differs."""
        ours, theirs = self.consumer, self.producers[0]
        alike = (ours.order, ours.block_size) == (theirs.order, theirs.block_size)
        return alike and ours.order is Order.HND and ours.kv_heads < theirs.kv_heads

    @property
    def is_all(self) -> bool:
        """Whether this consumer is all that its producers wait for, so that its load ends their leases."""
        return self.consumer.tp_size <= self.producers[0].tp_size


_RANK = Cut(tp_rank=1, tp_size=4)
_THIN = Cut(tp_rank=4, tp_size=16)
_LARGE_BLOCKS = Cut(tp_rank=1, tp_size=4, block_size=64)
_NHD = Cut(tp_rank=1, tp_size=4, order=Order.NHD)
_TP2, _TP1 = Cut(tp_rank=0, tp_size=2), Cut(tp_rank=0, tp_size=1)
_TP2_NHD = Cut(tp_rank=0, tp_size=2, order=Order.NHD)
_TP8 = (Cut(tp_rank=2, tp_size=8), Cut(tp_rank=3, tp_size=8))
_STAGED = Cut(tp_rank=1, tp_size=4, staged=True)
_DIRECT = Cut(tp_rank=1, tp_size=4, scratch=False)

BASELINE = "HND, cut alike"
THIN_BASELINE = "thin rank, cut alike"


def _case(label: str, consumer: Cut, *producers: Cut) -> Case:
    baseline = THIN_BASELINE if consumer == _THIN else BASELINE
    return Case(label=label, consumer=consumer, producers=producers, baseline="" if label == baseline else baseline)


CASES = (
    _case(BASELINE, _RANK, _RANK),
    _case("decode TP 2x, head slice", _RANK, _TP2),
    _case("decode TP 4x, head slice", _RANK, _TP1),
    _case("prefill TP 2x, two ranks", _RANK, *_TP8),
    _case("NHD, cut alike", _NHD, _NHD),
    _case("NHD, decode TP 2x", _NHD, _TP2_NHD),
    _case("NHD to HND", _RANK, _NHD),
    _case("NHD to HND, no scratch", _DIRECT, _NHD),
    _case("blocks of 16 to 64", _LARGE_BLOCKS, _RANK),
    _case("blocks of 64 to 16", _RANK, _LARGE_BLOCKS),
    _case("staged producer", _RANK, _STAGED),
    _case("staged consumer", _STAGED, _RANK),
    _case(THIN_BASELINE, _THIN, _THIN),
    _case("thin rank, decode TP 2x", _THIN, _TP8[0]),
    _case("thin rank, decode TP 4x", _THIN, _RANK),
)
"""The rank in most of them is the same process, the same runtime and the same memory; see `ranks`."""
