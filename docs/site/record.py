"""Record what docs/site/pictures.py draws: a hand-over over NIXL, and a stale read. Writes into docs/data.

    python docs/site/record.py

The two engines of the hand-over are in one process and share two cores or what there is; it is the second load of the
pair, so the connection is there. The numbers are those of one run on one machine: they show an order, not a speed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kvflow
from kvflow.observe.timeline import RecordFile
from kvflow.testing import InprocCluster

DATA = Path(__file__).resolve().parents[1] / "data"
BLOCKS, BLOCK_SIZE, LAYERS = 128, 16, 16


def cache() -> dict[str, torch.Tensor]:
    return {f"layers.{index}": torch.zeros(2, BLOCKS, 8, BLOCK_SIZE, 32) for index in range(LAYERS)}


async def record_hand_over(path: Path) -> list[dict[str, Any]]:
    """Prompt, lease, ticket, load, end: what the engines' own records say, and a line for what happens between them."""
    between: list[dict[str, Any]] = []
    with RecordFile(path) as records:
        prefill = kvflow.Runtime(kvflow.Config(engine_id="prefill-0", listen="tcp://127.0.0.1:0"), observers=[records])
        decode = kvflow.Runtime(kvflow.Config(engine_id="decode-0", listen="tcp://127.0.0.1:0"), observers=[records])
        async with prefill, decode:
            ours, theirs = cache(), cache()
            for runtime, tensors in ((prefill, ours), (decode, theirs)):
                layout = kvflow.CacheLayout.infer(tensors, order="HND", block_size=BLOCK_SIZE)
                await runtime.register_kv_caches(tensors, layout)
            for request_id in ("connect", "req-1"):
                await hand_over(prefill, decode, ours, request_id, between)
    return between


async def hand_over(
    prefill: kvflow.Runtime,
    decode: kvflow.Runtime,
    cache_of_prefill: dict[str, torch.Tensor],
    request_id: str,
    between: list[dict[str, Any]],
) -> None:
    def took(what: str, begin_s: float) -> None:
        line = {"kind": what, "request_id": request_id, "begin_s": begin_s, "ended_s": time.time()}
        between.append(line)

    begin_s = time.time()
    for tensor in cache_of_prefill.values():  # stands for the forward pass
        tensor.fill_(1.0)
    took("compute", begin_s)
    blocks = list(range(0, BLOCKS, 2))
    lease = prefill.serve_blocks(kvflow.ServeRequest(request_id, blocks, num_tokens=len(blocks) * BLOCK_SIZE))
    begin_s = time.time()
    params = json.loads(json.dumps(lease.ticket.to_params()))
    await asyncio.sleep(0.002)  # stands for the router
    took("ticket", begin_s)
    await decode.load_blocks(kvflow.LoadRequest(request_id, params, list(range(len(blocks)))))
    await lease


async def record_stale_read() -> list[dict[str, Any]]:
    """A reader that comes after the lease: what lies in the blocks, and what kvflow says."""
    cluster, frames = InprocCluster(), list[dict[str, Any]]()
    async with cluster.engine("prefill-0") as prefill, cluster.engine("decode-0") as decode:
        tensor = prefill.kv_caches["layers.0"]

        def frame(happens: str, state: str, reader: Callable[[], str]) -> None:
            prompt = {1.0: "A", 2.0: "B"}[tensor[0, 3].flatten()[0].item()]
            frames.append({"happens": happens, "lease": state, "blocks_hold": prompt, "reader": reader()})

        tensor[:, [3, 7, 9]] = 1.0
        lease = prefill.runtime.serve_blocks(kvflow.ServeRequest("A", block_ids=[3, 7, 9], num_tokens=41))
        params = lease.ticket.to_params()
        frame("Prompt A is computed and offered", str(lease.state), lambda: "has the ticket, waits in a queue")
        lease.revoke()
        await lease
        frame("The lease ends", str(lease.state), lambda: "still waits")
        tensor[:, [3, 7, 9]] = 2.0
        frame("The blocks go to prompt B", str(lease.state), lambda: "still waits")
        try:
            await decode.runtime.load_blocks(kvflow.LoadRequest("A", params, block_ids=[0, 1, 2]))
        except kvflow.errors.LeaseExpired as error:
            name = type(error).__name__
        frame("The reader comes", str(lease.state), lambda: f"kvflow: {name}")
    return frames


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    recorded = DATA / "handover.jsonl"
    recorded.unlink(missing_ok=True)
    between = asyncio.run(record_hand_over(recorded))
    with recorded.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in between)
    (DATA / "stale.json").write_text(json.dumps(asyncio.run(record_stale_read()), indent=2) + "\n")
