"""Layers that share a tensor, as Gemma 3n's last ones: their bytes are moved, copied, compared and stored once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvflow import (
    CacheLayout,
    Config,
    LeaseOutcome,
    LoadReport,
    LoadRequest,
    Runtime,
    ServeRequest,
    merge_tickets,
)
from kvflow.errors import LayoutError

BLOCKS, TOKENS, HEADS, SIZE = 8, 4, 2, 8
LAYERS = 5
BLOCK_BYTES = 2 * TOKENS * HEADS * SIZE * 4
"""Of one layer, K and V."""

ALONE = (0, 1, 2, 3, 4)
GEMMA = (0, 1, 2, 1, 2)
"""For each layer, the layer that owns its tensor."""
ONE = (0, 0, 0, 0, 0)


def cache(owners: Sequence[int], order: str = "HND", fill: float | None = None) -> dict[str, torch.Tensor]:
    """A cache: each layer holds the values of the layer that owns its tensor."""
    inner = (HEADS, TOKENS, SIZE) if order == "HND" else (TOKENS, HEADS, SIZE)
    tensors = [torch.zeros(2, BLOCKS, *inner) for _ in range(LAYERS)]
    return {f"layer.{layer}": tensors[owner] for layer, owner in enumerate(owners)}


def compute(caches: Mapping[str, torch.Tensor], order: str, blocks: Sequence[int]) -> None:
    """Write the values of a model with the sharing `GEMMA`."""
    for layer, owner in enumerate(GEMMA):
        values = torch.arange(2 * BLOCKS * HEADS * TOKENS * SIZE, dtype=torch.float32) + 10_000 * (owner + 1)
        plain = values.view(2, BLOCKS, HEADS, TOKENS, SIZE)
        told = plain if order == "HND" else plain.transpose(2, 3)
        caches[f"layer.{layer}"][:, list(blocks)] = told[:, list(blocks)]


def in_heads(caches: Mapping[str, torch.Tensor], layer: int, order: str, blocks: Sequence[int]) -> torch.Tensor:
    found = caches[f"layer.{layer}"][:, list(blocks)]
    return found if order == "HND" else found.transpose(2, 3)


class Pair:
    """Two engines with layers that share tensors, each in its own way."""

    def __init__(self, prefill: Runtime, decode: Runtime, caches: Sequence[dict[str, torch.Tensor]]) -> None:
        self.prefill, self.decode, self.caches = prefill, decode, caches
        self.orders = ("HND", "HND")

    async def load(self, **more: Any) -> LoadReport:
        theirs, ours = self.caches
        compute(theirs, self.orders[0], [3, 7])
        lease = self.prefill.serve_blocks(ServeRequest("req", block_ids=[3, 7], num_tokens=2 * TOKENS))
        report = await self.decode.load_blocks(LoadRequest("req", lease.ticket, [0, 5], **more))
        for layer in range(LAYERS):
            found = in_heads(ours, layer, self.orders[1], [0, 5])
            assert torch.equal(found, in_heads(theirs, layer, self.orders[0], [3, 7])), f"layer {layer}"
        untouched = [block for block in range(BLOCKS) if block not in (0, 5)]
        assert not any(torch.count_nonzero(tensor[:, untouched]) for tensor in ours.values())
        return report


@asynccontextmanager
async def pair_of(
    theirs: Sequence[int], ours: Sequence[int], orders: tuple[str, str] = ("HND", "HND"), **settings: Any
) -> AsyncIterator[Pair]:
    configs = [
        Config(engine_id=name, listen="tcp://127.0.0.1:0", transport="inproc", drain_timeout_s=0.1, **settings)
        for name in ("prefill", "decode")
    ]
    async with Runtime(configs[0]) as prefill, Runtime(configs[1]) as decode:
        caches = [cache(theirs, orders[0]), cache(ours, orders[1])]
        for runtime, one, order in zip((prefill, decode), caches, orders, strict=True):
            await runtime.register_kv_caches(one, CacheLayout.infer(one, order=order, block_size=TOKENS))
        pair = Pair(prefill, decode, caches)
        pair.orders = orders
        yield pair


@pytest.mark.parametrize(
    ("theirs", "ours", "tensors"),
    [
        (ALONE, ALONE, 5),
        (GEMMA, GEMMA, 3),
        (ALONE, GEMMA, 3),
        (GEMMA, ALONE, 5),  # ours are five memories, all of which have to be filled
        (GEMMA, (0, 1, 2, 1, 4), 4),
        ((0, 1, 2, 3, 2), GEMMA, 3),
    ],
)
@pytest.mark.parametrize("staging", ["never", "always"])
async def test_a_tensor_is_moved_once_whoever_shares_it(
    theirs: Sequence[int], ours: Sequence[int], tensors: int, staging: str
) -> None:
    async with pair_of(theirs, ours, staging=staging) as pair:
        report = await pair.load()
        assert (report.bytes, report.blocks, report.tokens) == (2 * tensors * BLOCK_BYTES, 2, 2 * TOKENS)
        assert report.descriptors == (2 if staging == "always" else 4) * tensors, "host blocks follow each other"


@pytest.mark.parametrize("orders", [("NHD", "HND"), ("HND", "NHD")])
@pytest.mark.parametrize("scratch", ["always", "never"])
async def test_a_tensor_is_permuted_once(orders: tuple[str, str], scratch: str) -> None:
    async with pair_of(GEMMA, GEMMA, orders, scratch=scratch) as pair:
        report = await pair.load(verify=True)
        assert (report.bytes, report.verified) == (2 * 3 * BLOCK_BYTES, True)


async def test_a_tensor_is_compared_once_and_every_layer_is_proved() -> None:
    async with pair_of(GEMMA, GEMMA, verify_share=1.0) as pair:
        assert (await pair.load()).verified
    async with pair_of(ALONE, GEMMA) as pair:
        assert (await pair.load(verify=True)).verified


async def test_stages_of_a_pipeline_that_cannot_share_are_read_once() -> None:
    """The second stage has copies of tensors that the first shares here: it is notified, and not read."""
    names = {"listen": "tcp://127.0.0.1:0", "transport": "inproc"}
    config = Config(engine_id="prefill", pp_size=2, **names)
    async with (
        Runtime(config) as first,
        Runtime(replace(config, pp_rank=1)) as second,
        Runtime(Config(engine_id="decode", **names)) as decode,
    ):
        theirs, ours = cache(ALONE), cache(GEMMA)
        compute(theirs, "HND", [3])
        for runtime, names_of in ((first, range(3)), (second, range(3, LAYERS)), (decode, None)):
            held = ours if names_of is None else {f"layer.{at}": theirs[f"layer.{at}"] for at in names_of}
            await runtime.register_kv_caches(held, CacheLayout.infer(held, order="HND", block_size=TOKENS))
        leases = [one.serve_blocks(ServeRequest("req", block_ids=[3], num_tokens=TOKENS)) for one in (first, second)]
        ticket = merge_tickets([lease.ticket for lease in leases])
        for verify in (False, True):
            report = await decode.load_blocks(LoadRequest("req", ticket, [5], verify=verify, keep_offer=not verify))
            assert report.bytes == 3 * BLOCK_BYTES
            assert all(torch.equal(ours[name][:, 5], theirs[name][:, 3]) for name in ours)
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2


async def test_layers_that_share_keys_alone_have_them_moved_once() -> None:
    """A pair of tensors for each layer: the last two share K, none shares V."""
    caches = []
    for _ in range(2):
        keys = [torch.zeros(BLOCKS, TOKENS, HEADS, SIZE) for _ in range(3)]
        values = [torch.zeros(BLOCKS, TOKENS, HEADS, SIZE) for _ in range(4)]
        caches.append({f"layer.{at}": (keys[min(at, 2)], values[at]) for at in range(4)})
    config = [Config(engine_id=name, listen="tcp://127.0.0.1:0", transport="inproc") for name in ("prefill", "decode")]
    async with Runtime(config[0]) as prefill, Runtime(config[1]) as decode:
        for runtime, one in zip((prefill, decode), caches, strict=True):
            await runtime.register_kv_caches(one, CacheLayout.infer(one, order="NHD", block_size=TOKENS))
        for layer, pair in enumerate(caches[0].values()):
            for part, tensor in enumerate(pair):
                tensor[3] = 1.0 + layer + 10 * part
        lease = prefill.serve_blocks(ServeRequest("req", block_ids=[3], num_tokens=TOKENS))
        report = await decode.load_blocks(LoadRequest("req", lease.ticket, [5], verify=True))
        assert report.bytes == 7 * TOKENS * HEADS * SIZE * 4
        for ours, theirs in zip(caches[1].values(), caches[0].values(), strict=True):
            assert all(torch.equal(mine[5], other[3]) for mine, other in zip(ours, theirs, strict=True))


async def test_a_view_that_is_shifted_is_no_shared_tensor() -> None:
    """Blocks of one layer would be written into those of another."""
    memory = torch.zeros(2, BLOCKS + 1, HEADS, TOKENS, SIZE)
    caches = {"layer.0": memory[:, :BLOCKS], "layer.1": memory[:, 1:]}
    async with Runtime(Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="inproc")) as runtime:
        with pytest.raises(LayoutError, match=r"layer 'layer\.1': K overlaps K of layer 'layer\.0'"):
            await runtime.register_kv_caches(caches, CacheLayout.infer(caches, order="HND", block_size=TOKENS))


async def test_host_buffers_hold_a_tensor_once() -> None:
    """So twice as many blocks of a cache with shared tensors fit into them."""
    most = 2 * 3 * BLOCK_BYTES
    async with pair_of(GEMMA, GEMMA, staging="always", host_buffer_bytes_max=most) as pair:
        assert (await pair.load(deadline_s=5.0)).blocks == 2
