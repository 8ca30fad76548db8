"""A producer on the stand-in in a process of its own: `python -m tests.accelerator.producing nixl`, or `mapped`.

It offers blocks that a held device has not computed, writes the ticket to its output, lets the device go on when a line
comes, and writes how the lease has ended.
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch

from tests.accelerator.sides import HERE, THEIRS, Side, Site
from tests.accelerator.standin import load

PRODUCER = Side(device=HERE, order="NHD", style="blocks_first")
FACTOR = 3.0


async def main() -> None:
    standin = load()
    async with Site(sys.argv[1]) as site:
        engine = await site.engine("producer", PRODUCER)
        compute, computed = torch.Stream(HERE), torch.Event(HERE)
        standin.hold()
        with compute:
            for tensor in engine.kv_caches.values():
                tensor.mul_(FACTOR)
        computed.record(compute)
        lease = engine.serve(THEIRS, ready=computed)
        print(json.dumps(lease.ticket.to_params()), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        standin.let_go()
        print(await lease, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
