"""Two engines in two terminals or on two machines: one fills blocks and offers them, the other loads and compares them.

    python examples/two_engines.py prefill --ticket ticket.json --device cuda:0 --host 10.0.0.7
    python examples/two_engines.py decode --ticket ticket.json --device cuda:0

The ticket, which a router would carry, is a file: with two machines, copy it from one to the other. There is no model;
the device fills the blocks with a pattern that both sides know, and every byte is compared.

On CUDA both sides pass events, as an engine has to. The offer has the event `ready`: no reader reads before the blocks
are filled. The load has the event `after`: no byte lands before the device has finished its work on these blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

import kvflow

LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_SIZE = 16, 8, 16, 128
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * BLOCK_SIZE * HEAD_SIZE * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--ticket", type=Path, required=True, help="prefill writes this file, decode reads it")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--host", default="127.0.0.1", help="where the other machine reaches this one")
    parser.add_argument("--port", type=int, default=0, help="of the side channel; 0 is any free one")
    parser.add_argument("--blocks", type=int, default=256, help=f"how many blocks of {BLOCK_BYTES >> 10} KiB")
    options = parser.parse_args()
    if options.device != "cpu":
        torch.cuda.set_device(options.device)
    asyncio.run(prefill(options) if options.role == "prefill" else decode(options))


async def prefill(options: argparse.Namespace) -> None:
    async with runtime_with_cache("prefill", options) as (runtime, kv_caches):
        block_ids = list(range(0, 2 * options.blocks, 2))
        for layer, tensor in enumerate(kv_caches.values()):  # in place of a forward pass
            tensor[torch.tensor(block_ids)] = block_content(layer, options)
        lease = runtime.serve_blocks(
            kvflow.ServeRequest("one", block_ids, num_tokens=len(block_ids) * BLOCK_SIZE, ready=record_event(options))
        )
        options.ticket.write_text(json.dumps(lease.ticket.to_params()))
        print(f"offered {options.blocks} blocks on {options.device}: the ticket is in {options.ticket}", flush=True)
        print(f"the lease ended as {await lease}")


async def decode(options: argparse.Namespace) -> None:
    ticket = json.loads(options.ticket.read_text())
    async with runtime_with_cache("decode", options) as (runtime, kv_caches):
        await runtime.prewarm([ticket])  # connect first, so that only the load is timed
        block_ids = list(range(2 * options.blocks - 1, 0, -2))
        request = kvflow.LoadRequest("one", ticket, block_ids, after=record_event(options))
        start_s = time.perf_counter()
        report = await runtime.load_blocks(request)
        seconds = time.perf_counter() - start_s
        right = [
            torch.equal(tensor[torch.tensor(block_ids)], block_content(layer, options))
            for layer, tensor in enumerate(kv_caches.values())
        ]
    print(f"read {report.bytes >> 20} MiB in {seconds * 1e3:.1f} ms: {report.bytes / seconds / 1e9:.2f} GB/s")
    print("every byte is right" if all(right) else f"WRONG BYTES in {right.count(False)} of {len(right)} layers")
    if not all(right):
        raise SystemExit(1)


@asynccontextmanager
async def runtime_with_cache(
    engine_id: str, options: argparse.Namespace
) -> AsyncIterator[tuple[kvflow.Runtime, dict[str, torch.Tensor]]]:
    shape = (2 * options.blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    kv_caches = {
        f"layers.{index}": torch.zeros(shape, dtype=torch.float16, device=options.device) for index in range(LAYERS)
    }
    layout = kvflow.CacheLayout.infer(kv_caches, order="HND", block_size=BLOCK_SIZE)
    config = kvflow.Config(engine_id=engine_id, listen=f"tcp://{options.host}:{options.port}", lease_ttl_s=300.0)
    async with kvflow.Runtime(config) as runtime:
        await runtime.register_kv_caches(kv_caches, layout)
        yield runtime, kv_caches


def block_content(layer: int, options: argparse.Namespace) -> torch.Tensor:
    """Return the content of a layer's blocks in prompt order: integers that fp16 represents exactly."""
    count = options.blocks * 2 * KV_HEADS * BLOCK_SIZE * HEAD_SIZE
    words = (torch.arange(count, device=options.device) + layer) % 2039
    return words.to(torch.float16).view(options.blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)


def record_event(options: argparse.Namespace) -> Any:
    """Record an event after all work submitted to the device so far, and return it; None on a CPU."""
    if options.device == "cpu":
        return None
    happened = torch.cuda.Event()  # type: ignore[no-untyped-call]
    happened.record()
    return happened


if __name__ == "__main__":
    main()
