"""Caches that are registered again, with the installed vLLM's own NixlConnector on one side. No server is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm

from kvflow import CacheLayout, Config, LoadRequest, ServeRequest
from kvflow.blocking import Runtime
from kvflow.stock import StockPeers
from kvflow.stock.params import Registrations, make_stock_params
from kvflow.stock.versions import line_of
from tests.vllm.stock_engine import BLOCK_SIZE, StockEngine, stock_engine

LENGTHS = [3, 31, 32, 33, 64, 100, 129, 417]
GENERATION = "remote_registration_generation"


@pytest.fixture(scope="module")
def stock() -> Iterator[StockEngine]:
    with stock_engine() as made:
        yield made


class Ours:
    """A rank of kvflow with a cache like the stock engine's."""

    def __init__(self, stock: StockEngine) -> None:
        peers = StockPeers(
            hashes=(stock.worker.compat_hash,),
            serve_version=vllm.__version__,
            attn_backend_name=stock.worker.backend_name,
            region_names=tuple(stock.names),
        )
        config = Config(engine_id="ours", listen="tcp://127.0.0.1:0", model="/m", num_kv_heads=stock.heads)
        self.registrations = Registrations()
        self.runtime = Runtime(config, parts=[peers])
        self.stock = stock
        self.caches: list[dict[str, torch.Tensor]] = []
        """All caches that were registered; the last one is. Stock readers may still know the others' memory."""

    @property
    def cache(self) -> dict[str, torch.Tensor]:
        return self.caches[-1]

    def register(self) -> None:
        if self.caches:
            self.runtime.unregister()
        self.caches.append(self.stock.new_cache())
        self.runtime.register_kv_caches(self.cache, CacheLayout.infer(self.cache, order="HND", block_size=BLOCK_SIZE))

    def offer(self, name: str, block_ids: list[int], num_tokens: int) -> tuple[Any, dict[str, Any]]:
        lease = self.runtime.serve_blocks(ServeRequest(f"{name}#secret", block_ids, num_tokens))
        generation = self.registrations.number_of(lease.ticket)
        return lease, make_stock_params(lease.ticket, vllm.__version__, generation=generation)


@pytest.fixture
def ours(stock: StockEngine) -> Iterator[Ours]:
    made = Ours(stock)
    with made.runtime:
        made.register()
        yield made


def blocks(num_tokens: int, first: int) -> list[int]:
    return list(range(first, first - (-num_tokens // BLOCK_SIZE)))


def tokens_of(cache: dict[str, torch.Tensor], block_ids: list[int], num_tokens: int) -> torch.Tensor:
    """Return the content of the first `num_tokens` tokens of some blocks in each layer."""
    layers = torch.stack([tensor[block_ids].transpose(1, 2).flatten(0, 1) for tensor in cache.values()])
    return layers[:, :num_tokens]


def ours_reads(ours: Ours, stock: StockEngine, turn: str) -> None:
    for length in LENGTHS:
        theirs, mine, name = blocks(length, 2), blocks(length, 30), f"{turn}-{length}"
        params = stock.offer(name, theirs, length)
        assert (GENERATION in params) == stock.counts
        ours.runtime.load_blocks(LoadRequest(name, ticket=params, block_ids=mine))
        assert torch.equal(tokens_of(ours.cache, mine, length), tokens_of(stock.cache, theirs, length))
        stock.wait_freed(name)


def stock_reads(stock: StockEngine, ours: Ours, turn: str) -> None:
    for length in LENGTHS:
        theirs, mine = blocks(length, 2), blocks(length, 30)
        lease, params = ours.offer(f"{turn}-{length}", theirs, length)
        assert params.get(GENERATION) == (len(ours.caches) if stock.counts else None)
        stock.read(params, mine)
        assert torch.equal(tokens_of(stock.cache, mine, length), tokens_of(ours.cache, theirs, length))
        assert lease.outcome.result(60).name == "READ"


def test_what_this_version_sends_is_known(stock: StockEngine) -> None:
    line = line_of(vllm.__version__)
    assert set(stock.offer("known", [1], 5)) == set(line.params)
    assert (GENERATION in line.params) == stock.counts


def test_ours_reads_and_asks_no_more_than_it_has_to(stock: StockEngine, ours: Ours) -> None:
    for turn in range(2):
        ours_reads(ours, stock, f"reads-{turn}")
    (peer,) = ours.runtime.statistics().peers
    assert (peer.state.name, peer.failures) == ("READY", 0)


def test_a_stock_producer_registers_again(stock: StockEngine, ours: Ours) -> None:
    """And under load: earlier offers are refused, or were read before."""
    if not stock.counts:
        pytest.skip(f"vLLM {vllm.__version__} never registers a cache again")
    ours_reads(ours, stock, "before")
    for turn in range(3):
        before = stock.shown().agent_metadata
        stock.register_again()
        assert stock.shown().agent_metadata != before
        ours_reads(ours, stock, f"again-{turn}")
        ours_reads(ours, stock, f"and-{turn}")


def test_a_producer_of_ours_registers_again(stock: StockEngine, ours: Ours) -> None:
    stock_reads(stock, ours, "before")
    if not stock.counts:
        pytest.skip(f"a stock reader with vLLM {vllm.__version__} connects once and for all")
    for turn in range(3):
        ours.register()
        stock_reads(stock, ours, f"again-{turn}")
        stock_reads(stock, ours, f"and-{turn}")
