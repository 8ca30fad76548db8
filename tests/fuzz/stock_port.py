#!/usr/bin/env python3
"""Fuzz of an engine that stock vLLM and kvflow read at once, over real NIXL, while honest readers of both load.

    python tests/fuzz/stock_port.py --messages 100000 --seed 1

Its one port is sent noise and mutants of both wires, over many connections; its agent is sent notifications with forged
names. What must hold: the runtime lives and answers, every honest load of either kind gets the right bytes and ends its
lease, no forged message ends a lease, and afterwards nothing has grown.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

from stock_engines import HASH, NAMES, TOKENS, StockConsumer, fill, layout_of, stock_cache, value_of
from tests_support import PATIENT, WAIT_S, limited

from kvflow import Lease, LeaseOutcome, LoadRequest, Runtime, ServeRequest
from kvflow.core.protocol.notifications import ReadDone, Renew
from kvflow.runtime.channel.listening import REQUEST_BYTES_MAX
from kvflow.stock import StockPeers, ask_rank
from kvflow.stock.params import make_stock_params
from kvflow.testing import assert_quiet
from tests.fuzz.attackers import send_messages, send_streams
from tests.fuzz.mutants import mutant, stock_text
from tests.fuzz.side_channel import Footprint, Report, options

VERSION = "0.32.0"
PEERS = StockPeers(hashes=(HASH,), serve_version=VERSION, attn_backend_name="CPU_ATTN", region_names=NAMES)
BLOCKS = 16
ATTACKERS = 2
Load = Callable[[dict[str, Any]], Awaitable[None]]
AT_ONCE = 50  # notifications between two looks at them


class Producer:
    """The engine under attack. Its requests have secret names, as in a fleet."""

    def __init__(self, runtime: Runtime, rng: Random) -> None:
        self.runtime = runtime
        self.port = int(runtime.address.rpartition(":")[2])
        self._rng = rng

    def offer(self, name: str, block_ids: list[int]) -> tuple[Lease, dict[str, Any]]:
        request_id = f"{name}#{self._rng.randbytes(16).hex()}"
        lease = self.runtime.serve_blocks(ServeRequest(request_id, block_ids, len(block_ids) * TOKENS))
        return lease, make_stock_params(lease.ticket, VERSION)


def check(cache: dict[str, torch.Tensor], params: dict[str, Any]) -> None:
    """That the right bytes have landed; the next load has to bring its own."""
    for layer, tensor in enumerate(cache.values()):
        for mine, theirs in enumerate(params["remote_block_ids"][0]):
            assert tensor[mine, 2, 0, 0].item() == value_of(layer, theirs, 2), "wrong bytes"
        tensor[:2] = 0.0


@contextlib.asynccontextmanager
async def our_reader() -> AsyncIterator[Load]:
    """An honest reader of our own make."""
    cache = stock_cache(BLOCKS)
    async with Runtime(replace(PATIENT, engine_id="reader", model="/m")) as runtime:
        await runtime.register_kv_caches(cache, layout_of(cache))

        async def load(params: dict[str, Any]) -> None:
            report = await runtime.load_blocks(LoadRequest("honest", ticket=params, block_ids=[0, 1]))
            assert report.freshness == "seal"
            check(cache, params)

        yield load
        assert_quiet(runtime.statistics())


@contextlib.asynccontextmanager
async def stock_reader() -> AsyncIterator[Load]:
    """An honest stock reader."""

    async def load(params: dict[str, Any]) -> None:
        if not engine.remote:
            await engine.handshake(params)
        await engine.read(params, [0, 1])
        check(engine.cache, params)

    with contextlib.closing(StockConsumer(BLOCKS)) as engine:
        yield load


async def work_honestly(producer: Producer, report: Report) -> None:
    """Readers of both kinds in turn, now and then new ones; a load that fails ends the fuzz."""
    rng = Random(5)
    kinds = {"ours": our_reader, "stock": stock_reader}
    while True:
        async with contextlib.AsyncExitStack() as stack:
            readers = {kind: await stack.enter_async_context(make()) for kind, make in kinds.items()}
            for turn in range(10):
                for kind, load in readers.items():
                    lease, params = producer.offer(f"honest-{turn}", rng.sample(range(BLOCKS), 2))
                    try:
                        async with asyncio.timeout(WAIT_S):
                            await load(params)
                            assert await lease is LeaseOutcome.READ
                    finally:
                        lease.revoke()
                    report.honest[kind] += 1
            report.honest["new readers"] += len(kinds)


async def notify(rng: Random, producer: Producer, count: int) -> None:
    """Forged notifications of both kinds. One lease has a name that they know, and may end; one has a secret."""
    attacker = StockConsumer(1)
    secret, _ = producer.offer("secret", [BLOCKS - 1])
    victim, params = producer.offer("victim", [BLOCKS - 2])
    await attacker.handshake(params)
    honest = ReadDone(lease_ids=(victim.ticket.lease_id,), reader="fuzz", numerator=1, denominator=3)
    renewal = Renew(lease_ids=(victim.ticket.lease_id,), reader="fuzz")
    names = ["secret", "honest-1", "honest-1#", f"secret#{'0' * 32}", params["remote_request_id"]]
    for number in range(count):
        told = rng.choice((honest, renewal))
        attacker.notify(mutant(rng, told) if rng.random() < 0.3 else stock_text(rng, names))
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
    last, params = producer.offer("last", [BLOCKS - 3])
    attacker.notify(f"{params['remote_request_id']}:1".encode())
    async with asyncio.timeout(WAIT_S):
        assert await last is LeaseOutcome.READ  # so all that was sent before has come
    assert not secret.done, "a forged word has ended a lease whose name nobody knows"
    for lease in (secret, victim):
        lease.revoke()
        await lease
    attacker.close()


async def fuzz(count: int, seed: int, *, requests_per_s: int = 1 << 40) -> Report:
    """Send that many messages of all kinds; raises if anything is not as it must be."""
    started_s, report = time.monotonic(), Report()
    cache = stock_cache(BLOCKS)
    fill(cache)
    config = replace(PATIENT, engine_id="producer", listen="tcp://127.0.0.1:0", model="/m")
    config = limited(config, side_channel_requests_per_s_max=requests_per_s)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(ATTACKERS + 1, mp_context=spawn) as attackers:
        async with Runtime(config, parts=[PEERS]) as runtime:
            await runtime.register_kv_caches(cache, layout_of(cache))
            producer = Producer(runtime, Random(seed))
            await attack(producer, attackers, f"{seed} warm", count // 10, Report())
            async with asyncio.TaskGroup() as group:
                work = group.create_task(work_honestly(producer, report))
                await passed(report, 2)
                report.before = Footprint.now()
                await attack(producer, attackers, str(seed), count, report)
                await passed(report, 2)
                report.after = Footprint.now()
                work.cancel()
            assert (await ask_rank(runtime.address, timeout_s=WAIT_S)).compatibility_hash == HASH
            statistics = runtime.statistics()
            assert statistics.state == "open"
            assert_quiet(runtime.statistics())
    report.listener, report.serving = statistics.listener, statistics.serving
    report.seconds = time.monotonic() - started_s
    return report


async def passed(report: Report, new_readers: int) -> None:
    """Wait until `new_readers` more readers have connected and have done all their loads."""
    wanted = report.honest["new readers"] + new_readers
    while report.honest["new readers"] < wanted:
        await asyncio.sleep(0)


async def attack(producer: Producer, attackers: ProcessPoolExecutor, seed: str, count: int, report: Report) -> None:
    """All attackers at once, until they are done."""
    runtime, some = producer.runtime, max(count // 10, 1)
    local = runtime._supervisor.incarnation.host.context.local  # type: ignore[union-attr]
    each = (count - 2 * some) // ATTACKERS
    about = (local.compatibility.fingerprint(), local.cache_shares, REQUEST_BYTES_MAX, each, b"")

    def run(attacker: Callable[..., int], *arguments: Any) -> asyncio.Future[int]:
        return asyncio.get_running_loop().run_in_executor(attackers, attacker, *arguments)

    sending = [run(send_messages, f"{seed} {n}", producer.port, *about, True) for n in range(ATTACKERS)]
    streams = run(send_streams, f"{seed} tcp", producer.port, some)
    await notify(Random(seed), producer, some)
    report.sent["notifications"] += some
    report.sent["messages"] += sum(await asyncio.gather(*sending))
    report.sent["tcp streams"] += await streams


def main() -> None:
    given = options(__doc__, 100_000)
    print(asyncio.run(fuzz(given.messages, given.seed)))


if __name__ == "__main__":
    main()
