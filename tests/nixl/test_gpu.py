"""A cache in GPU memory, over real NIXL."""

from __future__ import annotations

import pytest
import torch

from kvflow import CacheLayout, Config, LeaseOutcome, LoadRequest, Runtime, ServeRequest

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


def cache(fill: float) -> dict[str, torch.Tensor]:
    shape = (2, 16, 4, 16, 64)
    return {f"layers.{index}": torch.full(shape, fill, dtype=torch.float16, device="cuda") for index in range(4)}


async def test_blocks_move_from_gpu_memory_to_gpu_memory() -> None:
    ours, theirs = cache(-1.0), cache(3.0)
    layout = CacheLayout.infer(ours, order="HND", block_size=16)
    async with (
        Runtime(Config(engine_id="producer", listen="tcp://127.0.0.1:0")) as producer,
        Runtime(Config(engine_id="consumer", listen="tcp://127.0.0.1:0")) as consumer,
    ):
        await producer.register_kv_caches(theirs, layout)
        await consumer.register_kv_caches(ours, layout)
        lease = producer.serve_blocks(ServeRequest("r", block_ids=[3, 7, 9], num_tokens=48))
        report = await consumer.load_blocks(LoadRequest("r", ticket=lease.ticket, block_ids=[0, 1, 5]))
        assert await lease is LeaseOutcome.READ
    assert report.bytes == 3 * layout.block_size_bytes
    for tensor in ours.values():
        assert (tensor[:, [0, 1, 5]] == 3.0).all()
        assert (tensor[:, [2, 3, 4, *range(6, 16)]] == -1.0).all()
