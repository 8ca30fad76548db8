"""Tensor parallelism of the examples' engine: ranks with shards compute the same as one rank."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from paged_engine import LlamaModel, ModelConfig, all_reduce
from paged_engine.all_reduce import AllReduce, RankLostError, connected_ranks
from paged_engine.cache import BlockId, PagedKVCache
from paged_engine.sharding import Shard, divisible_kv_heads, take_shard
from paged_engine.weights import read_checkpoint
from tests_support import WAIT_S
from tiny_model import PROMPT, Model

Whole = tuple[ModelConfig, dict[str, torch.Tensor]]

KV_HEADS = 2
BLOCK_IDS = [BlockId(index) for index in (4, 1, 3)]


@pytest.fixture
def whole(tiny: Model) -> Whole:
    return read_checkpoint(tiny.checkpoint)


def computed(model: LlamaModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits after a prefill and one decode step, and the cache of all layers that they leave."""
    cache = PagedKVCache(
        model.layer_names,
        block_count=5,
        kv_head_count=model.config.kv_head_count,
        block_size=4,
        head_dim=model.config.head_dim,
        dtype=model.dtype,
    )
    pages = cache.pages(BLOCK_IDS)
    logits = [model.forward(PROMPT, 0, pages), model.forward([7], len(PROMPT), pages)]
    return torch.stack(logits), torch.stack(list(cache.tensors.values()))


def in_threads(ranks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of all ranks, which compute at the same time."""
    with ThreadPoolExecutor(len(ranks)) as executor:
        return [future.result(timeout=WAIT_S) for future in [executor.submit(rank) for rank in ranks]]


def connected(tp_size: int, stack: ExitStack) -> list[AllReduce]:
    return [stack.enter_context(closing(AllReduce(rank, peers))) for rank, peers in enumerate(connected_ranks(tp_size))]


class TestShards:
    @pytest.mark.parametrize(("tp_size", "kv_heads"), [(1, 3), (4, 4), (2, None), (3, 3), (2, 6)])
    def test_together_compute_what_the_whole_computes(self, whole: Whole, tp_size: int, kv_heads: int | None) -> None:
        logits, cache = computed(LlamaModel(*whole))
        with ExitStack() as stack:
            models = [
                LlamaModel(
                    *take_shard(*whole, Shard(tp_rank=rank, tp_size=tp_size, kv_head_count=kv_heads)), reduce=reduce
                )
                for rank, reduce in enumerate(connected(tp_size, stack))
            ]
            results = in_threads([lambda model=model: computed(model) for model in models])
        for rank_logits, _ in results:
            torch.testing.assert_close(rank_logits, logits, rtol=1e-4, atol=1e-4)
            assert torch.equal(rank_logits, results[0][0]), "ranks decide alike only if they compute the same bits"
        # What kvflow relies on: the ranks' caches next to each other are the cache of the whole, then zeros.
        joined = torch.cat([rank_cache for _, rank_cache in results], dim=3)
        torch.testing.assert_close(joined[:, :, :, :KV_HEADS], cache, rtol=1e-4, atol=1e-4)
        assert not joined[:, :, :, KV_HEADS:].any()
        assert joined.shape[3] == (kv_heads or KV_HEADS)

    def test_rows_are_not_copied(self, whole: Whole) -> None:
        """Processes that map the same file share these pages."""
        _, weights = take_shard(*whole, Shard(tp_rank=1, tp_size=2))
        for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
            assert weights[name].untyped_storage().data_ptr() == whole[1][name].untyped_storage().data_ptr()

    @pytest.mark.parametrize(
        ("shard", "message"),
        [
            (Shard(tp_size=3), "KV heads: 2 cannot be parted among 3 ranks"),
            (Shard(tp_size=5, kv_head_count=5), r"_proj\.weight: 48 cannot be parted among 5 ranks"),
            (Shard(kv_head_count=1), "the model has 2, 1 is less"),
        ],
        ids=["heads", "mlp", "fewer"],
    )
    def test_what_cannot_be_parted_is_refused(self, whole: Whole, shard: Shard, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            take_shard(*whole, shard)
        with pytest.raises(ValueError, match=r"tp_rank: 2 is not in 0\.\.1"):
            Shard(tp_rank=2, tp_size=2)

    @pytest.mark.parametrize(
        ("kv_heads", "tp_sizes", "wanted"), [(3, (2, 1, 4), 4), (3, (1, 1), 3), (3, (3, 2), 6), (8, (2, 4), 8)]
    )
    def test_heads_are_padded_as_little_as_possible(
        self, kv_heads: int, tp_sizes: tuple[int, ...], wanted: int
    ) -> None:
        assert divisible_kv_heads(kv_heads, tp_sizes) == wanted


class TestAllReduce:
    @pytest.mark.parametrize("tp_size", [1, 2, 4])
    def test_every_rank_gets_the_sum(self, tp_size: int) -> None:
        size = 1_000_000  # fits no socket buffer
        with ExitStack() as stack:
            ranks = connected(tp_size, stack)
            parts = [torch.full((size,), 10.0**rank) for rank in range(tp_size)]
            sums = in_threads(
                [lambda rank=rank, part=part: rank(part) for rank, part in zip(ranks, parts, strict=True)]
            )
        assert all(torch.equal(total, sum(parts[1:], parts[0])) for total in sums)

    @pytest.mark.parametrize("lost", [0, 1])
    def test_all_notice_that_one_has_gone(self, lost: int) -> None:
        with ExitStack() as stack:
            ranks = connected(3, stack)
            ranks[lost].close()

            def left_alone(rank: AllReduce) -> None:
                # What a worker does: it leaves, and its sockets with it.
                with closing(rank), pytest.raises(RankLostError):
                    rank(torch.ones(4))

            in_threads([lambda rank=rank: left_alone(rank) for index, rank in enumerate(ranks) if index != lost])

    def test_nobody_waits_forever_for_a_silent_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(all_reduce, "SILENCE_TIMEOUT_S", 0.05)
        ours, theirs = socket.socketpair()
        with closing(AllReduce(0, [ours])) as rank, theirs, pytest.raises(RankLostError, match="timed out"):
            rank(torch.ones(4))
