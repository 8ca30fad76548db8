"""Memory that several layers share is in a file once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvflow import CacheLayout, Config, Runtime
from kvflow.errors import NotStored
from kvflow.storage import RestoreRequest, SaveRequest, Storage
from tests.runtime.test_shared_tensors import ALONE, BLOCK_BYTES, GEMMA, ONE, TOKENS, cache, compute


@pytest.mark.parametrize(("owners", "tensors"), [(GEMMA, 3), (ONE, 1), (ALONE, 5)])
async def test_a_tensor_is_stored_once(owners: Sequence[int], tensors: int, tmp_path: Path) -> None:
    config = Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="inproc")
    storage = Storage(tmp_path / str(tensors))
    async with Runtime(config, parts=[storage]) as runtime:
        caches = cache(owners)
        await runtime.register_kv_caches(caches, CacheLayout.infer(caches, order="HND", block_size=TOKENS))
        compute(caches, "HND", [3, 7])
        expected = {name: tensor[:, [3, 7]].clone() for name, tensor in caches.items()}
        saved = await storage.save(SaveRequest("save", key="k", block_ids=[3, 7], num_tokens=2 * TOKENS))
        restored = await storage.restore(RestoreRequest("back", "k", block_ids=[0, 5], num_tokens=2 * TOKENS))
        assert restored.bytes == 2 * tensors * BLOCK_BYTES
        assert saved.bytes - restored.bytes == 4096, "the header"
        assert all(torch.equal(caches[name][:, [0, 5]], blocks) for name, blocks in expected.items())


async def test_an_entry_of_a_cache_that_shares_otherwise_is_not_found(tmp_path: Path) -> None:
    """Its bytes lie otherwise in the file."""
    config = Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="inproc")
    storage = Storage(tmp_path / "store")
    for owners in (GEMMA, ALONE, (0, 1, 2, 2, 1)):
        async with Runtime(config, parts=[storage]) as runtime:
            caches = cache(owners)
            await runtime.register_kv_caches(caches, CacheLayout.infer(caches, order="HND", block_size=TOKENS))
            assert not storage.has("k")
            with pytest.raises(NotStored):
                await storage.restore(RestoreRequest("back", "k", block_ids=[0], num_tokens=TOKENS))
            await storage.save(SaveRequest("save", key="k", block_ids=[3], num_tokens=TOKENS))
            assert storage.has("k")
