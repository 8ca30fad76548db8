"""The service on Ray Serve against the example server, the same requests in turns; and a decode replica is killed.

Run it in the environment of `python3 dev.py ray`, on a machine that does nothing else:

    KVFLOW_RAY_MODEL=.venv-ray/smollm2 PYTHONPATH=.:examples .venv-ray/bin/python tests/ray/compare.py
        [--rounds 40] [--clients 50]

Both run all the time, with one prefill and one decode engine each, and are asked in turns, one client at a time, so
that what else the machine does hits both alike. Answers are compared with those of one engine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from ray_server.cluster import local_cluster, wait_until

from tests.ray.fleet import WHOLE_S, Fleet, fixed
from tests.support.server_load import ALL_QUESTIONS, Load, Tally, answers_alone, run_client

TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="of two requests to each, one of them streamed")
    parser.add_argument("--clients", type=int, default=50, help="while a decode replica is killed; 0 leaves that out")
    options = parser.parse_args()
    checkpoint = os.environ["KVFLOW_RAY_MODEL"]
    right = asyncio.run(answers_alone(Path(checkpoint), ALL_QUESTIONS, TOKENS))
    with local_cluster(3, port=8123) as cluster:
        fleet = Fleet(cluster, checkpoint, right)
        fleet.have(fixed(1), fixed(1))
        print(f"load average {os.getloadavg()[0]:.1f} before", flush=True)
        report(asyncio.run(in_turns(fleet, options.rounds)))
        if options.clients:
            killed(fleet, options.clients)


async def in_turns(fleet: Fleet, rounds: int) -> dict[str, Tally]:
    load = Load(clients=1, requests=2, tokens=TOKENS)
    async with example_server(fleet.checkpoint) as url:
        urls = {"example server": url, "Ray Serve": fleet.cluster.url}
        tallies = {name: Tally() for name in urls}
        for url in urls.values():  # the first hand-over includes a handshake
            await run_client(url, load, 0, fleet.right, Tally())
        for index in range(rounds):
            for name in sorted(urls, reverse=bool(index % 2)):
                await run_client(urls[name], load, index, fleet.right, tallies[name])
    return tallies


@asynccontextmanager
async def example_server(checkpoint: str) -> AsyncIterator[str]:
    """The example server with one worker of each kind; its URL."""
    words = ("serve", "--port", "0", "--checkpoint", checkpoint, "--deadline-s", "120")
    process = await asyncio.create_subprocess_exec(sys.executable, "examples/openai_server", *words, stdout=PIPE)
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            if line.startswith(b"ready: "):
                yield line.decode().split()[1].removesuffix("/v1")
                return
        raise RuntimeError("the example server did not start")
    finally:
        process.terminate()
        await process.wait()


def report(tallies: dict[str, Tally]) -> None:
    rows = {}
    for name, tally in tallies.items():
        assert tally.good, (name, tally.wrong, tally.unclear)
        rows[name] = median(tally.first_token_s), median(tally.seconds)
        first, whole = (f"{one_s * 1e3:.1f} ms" for one_s in rows[name])
        print(f"{name}: p50 of the first piece {first}, of a request {whole};", end=" ")
        print(f"{tally.right} right, {tally.failed.total()} failed")
    ratios = (theirs / ours for ours, theirs in zip(rows["example server"], rows["Ray Serve"], strict=True))
    first, whole = (f"{ratio:.2f}" for ratio in ratios)
    print(f"Ray Serve to the example server: first piece {first}, request {whole}", flush=True)


def killed(fleet: Fleet, clients: int) -> None:
    """One of two decode replicas is killed under load; how long until the service is whole."""
    fleet.have(fixed(2), fixed(2))
    load = Load(clients=clients, requests=2, tokens=TOKENS)
    with fleet.under_load(load) as tally:
        wait_until(lambda: tally.ended >= clients // 2, "the load has begun", 120.0)
        pid = next(iter(fleet.pids("Decode")))
        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        wait_until(lambda: fleet.count("Decode") < 2, "Serve has seen it", WHOLE_S)
        wait_until(lambda: fleet.count("Decode") == 2, "there are two again", WHOLE_S)
        back_s = time.monotonic() - began_s
    wait_until(fleet.whole, "all blocks are free", WHOLE_S)
    print(f"{clients} clients, a decode replica killed: {tally.right} right, {dict(tally.failed)}, 0 wrong")
    print(f"two replicas again after {back_s:.1f} s, whole and idle after {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()
