"""A program of the bench `against`: the cost of one-block loads between two runtimes of this process, as JSON.

It uses kvflow's public interface alone, so that it runs with the kvflow of any checkout. Bytes go through the
transport `inproc`, so that what is measured is kvflow. Objects of before the measurements are frozen.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

import kvflow

_TOKENS = 16
_ALONE = 100


@asynccontextmanager
async def open_pair(blocks: int) -> AsyncIterator[tuple[kvflow.Runtime, kvflow.Runtime]]:
    """A prefill and a decode runtime with caches of that many blocks."""
    prefill, decode = (
        kvflow.Runtime(kvflow.Config(engine_id=name, listen="tcp://127.0.0.1:0", transport="inproc"))
        for name in ("prefill", "decode")
    )
    async with prefill, decode:
        for runtime in (prefill, decode):
            cache = {"layer": torch.zeros(2, blocks, 2, _TOKENS, 16)}
            layout = kvflow.CacheLayout.infer(cache, order="HND", block_size=_TOKENS)
            await runtime.register_kv_caches(cache, layout)
        yield prefill, decode


def offer(prefill: kvflow.Runtime, name: str, block: int) -> tuple[kvflow.Lease, kvflow.LoadRequest]:
    lease = prefill.serve_blocks(kvflow.ServeRequest(name, block_ids=[block], num_tokens=_TOKENS))
    return lease, kvflow.LoadRequest(name, ticket=lease.ticket.to_params(), block_ids=[block])


async def one_by_one(loads: int) -> float:
    """CPU seconds of the loop's thread for each of `loads` warm loads."""
    async with open_pair(_ALONE) as (prefill, decode):
        for label in ("warm", "timed"):
            spent_s = 0.0
            for begin in range(0, loads, _ALONE):
                offers = [offer(prefill, f"{label} {begin + block}", block) for block in range(_ALONE)]
                if begin == 0:
                    gc.collect()
                    gc.freeze()
                begun_s = time.thread_time()
                for _, wanted in offers:
                    await decode.load_blocks(wanted)
                spent_s += time.thread_time() - begun_s
                await asyncio.gather(*(lease for lease, _ in offers))  # their ends are not part of a load
        return spent_s / loads


async def all_at_once(loads: int) -> tuple[float, float]:
    """CPU seconds of the loop's thread for each of `loads` loads that are begun together; seconds until all ended."""
    async with open_pair(loads) as (prefill, decode):
        for label in ("warm", "timed"):
            offers = [offer(prefill, f"{label} {block}", block) for block in range(loads)]
            gc.collect()
            gc.freeze()
            begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
            await asyncio.gather(*(decode.load_blocks(wanted) for _, wanted in offers))
            wall_s, cpu_s = time.perf_counter() - begun_s, time.thread_time() - begun_cpu_s
            await asyncio.gather(*(lease for lease, _ in offers))
        return cpu_s / loads, wall_s


if __name__ == "__main__":
    alone, burst = map(int, sys.argv[1:])
    alone_s = asyncio.run(one_by_one(alone))
    burst_s, wall_s = asyncio.run(all_at_once(burst))
    print(json.dumps({"alone_s": alone_s, "burst_s": burst_s, "wall_s": wall_s, "kvflow": kvflow.__file__}))
