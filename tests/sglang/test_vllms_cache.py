"""A prompt's KV between vLLM's cache and SGLang's pool, both ways: kvflow's plan turns one form into the other.

vLLM's tensors are as its FLASH_ATTN backend allocates them (by name and version, since its kernels need a GPU).
SGLang's are its own pool. K and V are those of a real model. Between the two *plugins* requests do not flow: the last
test says what keeps them apart.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

import torch
import transformers
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

import kvflow
from kvflow.attention_backends import layout_for_backend
from kvflow.errors import PeerIncompatible
from kvflow.sglang.pools import kv_buffers
from tests.sglang.servers import ROOT
from tests.sglang.sides import arguments
from tests.sglang.tiny import VOCABULARY

LAYERS, HEADS, SIZE = 4, 2, 32
PAGE, PAGES, BLOCK, BLOCKS = 16, 24, 32, 12
LENGTHS = (15, 16, 33, 100)
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
"""Tolerances of float32 values of prompts that are computed in other steps."""

Both = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def model() -> Any:
    folder = Path(os.environ.get("KVFLOW_SGLANG_HOME", ROOT / ".venv-sglang")) / "tiny" / "llama"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


def computed(model: Any, prompt: torch.Tensor, chunk: int) -> Both:
    """K and V of each layer as (tokens, heads, size), computed in chunks."""
    past = transformers.DynamicCache()
    with torch.no_grad():
        for start in range(0, prompt.shape[1], chunk):
            model(prompt[:, start : start + chunk], past_key_values=past, use_cache=True)
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in past.layers]


class VLLM:
    """vLLM's cache: K and V of a head side by side since 0.26, as two halves of a block before."""

    def __init__(self, version: str) -> None:
        self.fused = version >= "0.26"
        shape = (BLOCKS, HEADS, BLOCK, 2 * SIZE) if self.fused else (BLOCKS, 2, BLOCK, HEADS, SIZE)
        self.tensors = {f"model.layers.{at}.self_attn.attn": torch.zeros(shape) for at in range(LAYERS)}
        self.caches: Any = self.tensors
        self.layout = layout_for_backend(
            self.caches, backend="FLASH_ATTN", block_size=BLOCK, engine_version=version, layer_indices=range(LAYERS)
        )
        self.block_size = BLOCK

    def both(self, blocks: list[int]) -> Both:
        """Views of K and V of the blocks, as (blocks, tokens, heads, size)."""
        if self.fused:
            return [tuple(layer[blocks].transpose(1, 2).split(SIZE, -1)) for layer in self.tensors.values()]
        return [tuple(layer[blocks].unbind(1)) for layer in self.tensors.values()]

    def write(self, blocks: list[int], content: Both) -> None:
        for layer, (keys, values) in zip(self.tensors.values(), content, strict=True):
            for at in range(len(keys)):
                block, row = blocks[at // BLOCK], at % BLOCK
                if self.fused:
                    layer[block, :, row] = torch.cat([keys[at], values[at]], dim=-1)
                else:
                    layer[block, 0, row], layer[block, 1, row] = keys[at], values[at]


class SGLang:
    """SGLang's pool: a buffer of K and one of V for each layer, token by token."""

    def __init__(self) -> None:
        self.pool = MHATokenToKVPool(
            (PAGES - 1) * PAGE,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=SIZE,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        buffers = [self.pool.get_kv_buffer(at) for at in range(LAYERS)]
        paged = [tuple(one[: PAGES * PAGE].view(-1, PAGE, HEADS, SIZE) for one in pair) for pair in buffers]
        self.caches: Any = {f"kv.{at}": pair for at, pair in enumerate(paged)}
        self.layout = kvflow.CacheLayout.infer(
            self.caches, order="NHD", block_size=PAGE, style="apart", layer_indices=range(LAYERS)
        )
        self.block_size = PAGE

    def both(self, blocks: list[int]) -> Both:
        return [tuple(part[blocks] for part in pair) for pair in self.caches.values()]

    def write(self, blocks: list[int], content: Both) -> None:
        """By SGLang's own call."""
        places = torch.tensor([blocks[at // PAGE] * PAGE + at % PAGE for at in range(len(content[0][0]))])
        for at, (keys, values) in enumerate(content):
            layer = RadixAttention(HEADS, SIZE, 1.0, HEADS, at)
            self.pool.set_kv_buffer(layer, places, keys.contiguous(), values.contiguous())


def config(engine_id: str, model: str = "llama") -> kvflow.Config:
    return kvflow.Config(engine_id=engine_id, model=model, listen="tcp://127.0.0.1:0", transport="inproc")


async def moved(source: VLLM | SGLang, target: VLLM | SGLang, content: Both, length: int) -> Both:
    """Write a prompt into one engine's cache, have the other one load it, and return what that has then."""
    given, taken = (
        [*range(first, first + -(-length // side.block_size))][::-1] for side, first in ((source, 2), (target, 3))
    )
    source.write(given, content)
    async with kvflow.Runtime(config("prefill")) as prefill, kvflow.Runtime(config("decode")) as decode:
        for runtime, side in ((prefill, source), (decode, target)):
            await runtime.register_kv_caches(side.caches, side.layout)
        lease = prefill.serve_blocks(kvflow.ServeRequest("r", block_ids=given, num_tokens=length))
        report = await decode.load_blocks(kvflow.LoadRequest("r", ticket=lease.ticket.to_params(), block_ids=taken))
        assert (report.tokens, await lease) == (length, kvflow.LeaseOutcome.READ)
    return [(keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]) for keys, values in target.both(taken)]


@pytest.mark.parametrize("version", ["0.25.0", "0.32.0"])
@pytest.mark.parametrize("to_sglang", [True, False], ids=["vLLM to SGLang", "SGLang to vLLM"])
def test_a_prompts_cache_in_the_others_form(model: Any, version: str, to_sglang: bool) -> None:
    for length in LENGTHS:
        prompt = prompt_of(length)
        content = computed(model, prompt, chunk=512)
        sides = (VLLM(version), SGLang()) if to_sglang else (SGLang(), VLLM(version))
        found = asyncio.run(moved(*sides, content, length))
        by_itself = computed(model, prompt, chunk=7)
        for at, (ours, sent, own) in enumerate(zip(found, content, by_itself, strict=True)):
            for part in range(2):
                assert torch.equal(ours[part], sent[part]), f"layer {at}: other bytes than were sent"
                torch.testing.assert_close(ours[part], own[part], **ROUNDING)
        other = computed(model, prompt_of(length + 1)[:, :length], chunk=512)
        assert not torch.allclose(found[0][0], other[0][0], **ROUNDING), "any prompt would have passed"


def test_what_keeps_the_two_plugins_apart() -> None:
    """SGLang's plugin registers the same memory as bytes, under a name of the format in place of the model's.

    Its requests meet in rooms, and the first token comes with the prompt, in a row that only SGLang's schedulers fill
    and read; vLLM's have tickets. So neither can take a request of the other, and their caches say so, too.
    """
    sglang = SGLang()
    from sglang.srt.disaggregation.utils import MetadataBuffers

    args = arguments(sglang.pool, 0, MetadataBuffers(4, 16, torch.float32, 16), heads=HEADS, page_size=PAGE)
    buffers = kv_buffers(args, heads=HEADS)

    async def refusal() -> BaseException | None:
        async with kvflow.Runtime(config("vllm")) as vllm, kvflow.Runtime(config("sglang", buffers.format)) as other:
            ours = VLLM("0.32.0")
            await vllm.register_kv_caches(ours.caches, ours.layout)
            await other.register_kv_caches([buffers.group("cpu")])
            lease = vllm.serve_blocks(kvflow.ServeRequest("r", block_ids=[2], num_tokens=20))
            (one,) = await other.prewarm([lease.ticket])
            lease.revoke()
            return one

    error = asyncio.run(refusal())
    assert isinstance(error, PeerIncompatible)
    assert "dtype: ours 'uint8', theirs 'float32'" in str(error)
    assert "model: ours 'float32.plain', theirs 'llama'" in str(error)
