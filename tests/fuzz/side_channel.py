#!/usr/bin/env python3
"""Fuzz of everything that comes from outside, while honest engines shake hands and load.

    python tests/fuzz/side_channel.py --messages 200000 --seed 1

An honest producer is sent mutated and random messages, bytes over TCP and notifications; an honest reader is given
mutated tickets, and answers of a producer that lies. Side channels are real, bytes move in process. Three times: with
limits so high that everything is looked at, with limits that attackers exceed, and with CURVE against peers that have
no key.

What must hold: the only errors are typed, the producer's listener lives, metadata with a wrong checksum never reaches
the transport, every honest load brings the right bytes, and afterwards nothing has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import enum
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import torch
import zmq
import zmq.asyncio

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

from tests_support import PATIENT, WAIT_S, altered, limited

from kvflow import CacheLayout, Config, LeaseOutcome, LoadRequest, Runtime, ServeRequest
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.notifications import ReadDone, Renew
from kvflow.errors import KVFlowError
from kvflow.runtime.channel.keyring import Keyring, make_key_files
from kvflow.runtime.channel.listening import REQUEST_BYTES_MAX
from kvflow.runtime.incarnation import Incarnation
from kvflow.runtime.world import World
from kvflow.testing import InprocNetwork, InprocTransport, assert_quiet
from kvflow.transport.base import AgentName
from tests.fuzz.attackers import send_messages, send_streams
from tests.fuzz.mutants import bent, mutant

BLOCKS = 32
PRODUCER_FILL = 7.0
ATTACKERS = 2
REQUESTS_PER_S = 30  # what attackers exceed on a slow host, too


class Mode(enum.StrEnum):
    UNLIMITED = "unlimited"
    LIMITS = "limits"
    CURVE = "curve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resources of the process."""

    resident_mb: float
    descriptors: int
    threads: int
    tasks: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free is not held
        process = psutil.Process()
        return cls(
            resident_mb=process.memory_info().rss / 2**20,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=process.num_threads(),
            tasks=len(asyncio.all_tasks()),
        )


@dataclass(slots=True)
class Report:
    """The sent messages, their outcomes, and the process's resources before and after."""

    sent: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    honest: Counter[str] = field(default_factory=Counter)
    """Loads and handshakes that had nothing to do with it; none has failed."""
    listener: Any = None
    serving: Any = None
    before: Footprint | None = None
    after: Footprint | None = None
    seconds: float = 0.0

    @property
    def honest_loads(self) -> int:
        return self.honest["loads"]

    @property
    def honest_handshakes(self) -> int:
        return self.honest["new readers"]

    def __str__(self) -> str:
        counts = {name: getattr(self, name) for name in ("sent", "honest", "errors")}
        counts |= {name: msgspec.to_builtins(getattr(self, name)) for name in ("listener", "serving")}
        told = [f"{name:9} " + ", ".join(f"{some} {one}" for one, some in of.items()) for name, of in counts.items()]
        head = f"== {sum(self.sent.values())} hostile messages in {self.seconds:.0f} s"
        return "\n".join([head, *told, f"before    {self.before}", f"after     {self.after}"])


class Recorder(InprocTransport):
    """An in-process transport that records the agents that it was asked to add."""

    def __init__(self, name: str, network: InprocNetwork) -> None:
        super().__init__(name, network)
        self.connected: set[bytes] = set()

    async def add_peer(self, metadata: bytes, device_memory: bytes = b"") -> AgentName:
        self.connected.add(metadata)
        return await super().add_peer(metadata, device_memory)


@dataclass(frozen=True, slots=True)
class Engine:
    """A runtime with a cache, and the transport under it."""

    runtime: Runtime
    transport: Recorder
    kv_caches: dict[str, torch.Tensor]

    @property
    def incarnation(self) -> Incarnation:
        incarnation = self.runtime._supervisor.incarnation
        assert incarnation is not None
        return incarnation


@contextlib.asynccontextmanager
async def engine(config: Config, network: InprocNetwork, fill: float) -> AsyncIterator[Engine]:
    kv_caches = {f"layers.{index}": torch.full((2, BLOCKS, 2, 4, 8), fill) for index in range(2)}
    made: list[Recorder] = []

    def make(_: Config, name: str) -> InprocTransport:
        made.append(Recorder(name, network))
        return made[0]

    async with Runtime(config, world=World(transport=make)) as runtime:
        await runtime.register_kv_caches(kv_caches, CacheLayout.infer(kv_caches, order="HND", block_size=4))
        yield Engine(runtime, made[0], kv_caches)


def config_of(mode: Mode, name: str, keys: Path) -> Config:
    config = replace(PATIENT, engine_id=name, listen="tcp://127.0.0.1:0", transport="inproc")
    match mode:
        case Mode.UNLIMITED:
            return limited(config, side_channel_requests_per_s_max=1 << 40)
        case Mode.LIMITS:
            return limited(config, side_channel_requests_per_s_max=REQUESTS_PER_S)
        case Mode.CURVE:
            return replace(config, curve_secret_key_file=keys / f"{name}.secret", curve_peers_dir=keys)


async def key_of(producer: Engine) -> bytes:
    """The producer's public key, which need not be a secret."""
    config = producer.runtime.config
    assert config.curve_secret_key_file is not None
    assert config.curve_peers_dir is not None
    files = Path(config.curve_secret_key_file), Path(config.curve_peers_dir)
    return (await Keyring.read(config.engine_id, *files, lambda: 0.0)).own_keys.public


# --- the lies that a reader is told


async def notify(rng: Random, producer: Engine, count: int) -> None:
    """Send notifications, some for an open lease. A sender that knows a lease's id may end it, and nothing else."""
    lease: Any = None
    for _ in range(count):
        if lease is None or lease.done:
            lease = producer.runtime.serve_blocks(
                ServeRequest("victim", block_ids=[BLOCKS - 1], num_tokens=4, ttl_s=60)
            )
        lease_id = rng.choice((lease.ticket.lease_id, rng.randbytes(16).hex()))
        done = ReadDone(lease_ids=(lease_id,), reader="fuzz", numerator=1, denominator=rng.choice((1, 3)))
        told = rng.choice((done, Renew(lease_ids=(lease_id, rng.randbytes(16).hex()), reader="fuzz")))
        size = rng.choice((1, 40, 5000))
        producer.transport.deliver(mutant(rng, told) if rng.random() < 0.8 else rng.randbytes(rng.randrange(size)))
        await asyncio.sleep(0)
    lease.revoke()
    await lease


async def load_altered_tickets(rng: Random, producer: Engine, reader: Engine, count: int) -> Counter[str]:
    """Load with tickets that were changed on their way. They must not lead to another machine or to another port."""
    errors: Counter[str] = Counter()
    for _ in range(count):
        lease = producer.runtime.serve_blocks(ServeRequest("victim-2", block_ids=[BLOCKS - 2], num_tokens=4))
        params = bent(rng, lease.ticket.to_params())
        if isinstance(params, dict):
            if params.get("remote_host") != lease.ticket.first.host:
                params["remote_host"] = rng.choice((None, 7, "", "-", "a b", "0.0.0.0", "x" * 300, "\0", ["h"]))
            if params.get("remote_port") != lease.ticket.first.port:
                params["remote_port"] = rng.choice((None, -1, 0, 1, 65536, 1 << 70, "80", 1.5))
        errors[await outcome(reader, LoadRequest("bent", ticket=params, block_ids=[BLOCKS - 2], deadline_s=0.5))] += 1
        lease.revoke()
        await lease
    return errors


async def outcome(reader: Engine, request: LoadRequest) -> str:
    """How a load ended: the name of a typed error, or "loaded". Anything else is what this looks for."""
    try:
        await reader.runtime.load_blocks(request)
    except KVFlowError as error:
        return type(error).__name__
    return "loaded"


async def ask_a_liar(rng: Random, producer: Engine, reader: Engine, count: int) -> Counter[str]:
    """Loads from a producer that answers everything with mutants of what an honest one would say."""
    errors: Counter[str] = Counter()
    honest, local = producer.incarnation._metadata, producer.incarnation.host.context.local
    refusal = messages.Refusal(
        reason="no",
        version=codec.PROTOCOL_VERSION,
        compatibility=local.compatibility,
        cache_shares=local.cache_shares,
    )
    noted = messages.Ack(incarnation=honest.incarnation)

    def lie() -> list[bytes]:
        body = rng.choice((honest, honest, honest, refusal, noted))
        header = codec.our_header(b"")
        match rng.randrange(8):
            case 0:
                return [mutant(rng, header), codec.encode(body)]
            case 1:
                return [rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(1, 5))]
            case _:
                return [codec.encode(header), mutant(rng, body)]

    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        async def answer() -> None:
            while True:
                sender, *_ = await router.recv_multipart()
                await router.send_multipart([sender, *lie()])

        async with asyncio.TaskGroup() as group:
            task = group.create_task(answer())
            for _ in range(count):
                lease = producer.runtime.serve_blocks(ServeRequest("victim-3", block_ids=[BLOCKS - 3], num_tokens=4))
                ticket = altered(lease.ticket, port=port)
                errors[await outcome(reader, LoadRequest("lie", ticket=ticket, block_ids=[3], deadline_s=2.0))] += 1
                lease.revoke()
                await lease
                await reader.runtime.forget_peer("producer")  # shake hands again
            task.cancel()
    return errors


# --- honest work


@dataclass(frozen=True, slots=True)
class Scene:
    """The participants."""

    mode: Mode
    producer: Engine
    reader: Engine
    victim: Engine
    newcomer: Config
    network: InprocNetwork
    attackers: ProcessPoolExecutor


async def work_honestly(on: Scene, report: Report) -> None:
    """Load beside the attacks, now and then with a new reader. A failed load ends the fuzz."""
    while True:
        await load_honestly(on, on.reader, report)
        if report.honest_loads % 10 == 1:
            async with engine(on.newcomer, on.network, 0.0) as fresh:
                await load_honestly(on, fresh, report)
                report.honest["new readers"] += 1


async def load_honestly(on: Scene, reader: Engine, report: Report) -> None:
    lease = on.producer.runtime.serve_blocks(ServeRequest("honest", block_ids=[2, 5], num_tokens=8))
    ticket = lease.ticket.to_params()
    for tensor in reader.kv_caches.values():
        tensor[:, :2] = 0.0
    try:
        await reader.runtime.load_blocks(LoadRequest("honest", ticket=ticket, block_ids=[0, 1]))
        assert all((tensor[:, :2] == PRODUCER_FILL).all() for tensor in reader.kv_caches.values()), "wrong bytes"
        assert await lease is LeaseOutcome.READ
    finally:
        lease.revoke()
    report.honest["loads"] += 1


@contextlib.asynccontextmanager
async def scene(mode: Mode) -> AsyncIterator[Scene]:
    """Open engines; afterwards nothing may be under way in them."""
    network = InprocNetwork()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        for name in ("producer", "reader", "victim", "newcomer"):
            await asyncio.to_thread(make_key_files, keys, name)
        victim_config = limited(  # it goes on asking those that lie
            config_of(Mode.UNLIMITED, "victim", keys), peer_backoff_first_s=1e-6, peer_backoff_max_s=1e-6
        )
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(ATTACKERS + 1, mp_context=spawn) as attackers:
            async with (
                engine(config_of(mode, "producer", keys), network, PRODUCER_FILL) as producer,
                engine(config_of(mode, "reader", keys), network, 0.0) as reader,
                engine(victim_config, network, 0.0) as victim,
            ):
                yield Scene(mode, producer, reader, victim, config_of(mode, "newcomer", keys), network, attackers)
            for one in (producer, reader, victim):
                assert_quiet(one.runtime.statistics())


async def fuzz(messages: int, seed: int, mode: Mode) -> Report:
    """Send that many messages of all kinds; raises if anything is not as it must be."""
    started_s, report = time.monotonic(), Report()
    async with scene(mode) as on:
        await attack(on, f"{seed} warm", messages // 10, Report())
        async with asyncio.TaskGroup() as group:
            work = group.create_task(work_honestly(on, report))
            while report.honest_handshakes == 0:
                await asyncio.sleep(0)
            report.before = Footprint.now()
            await attack(on, str(seed), messages, report)
            loads = report.honest_loads
            while report.honest_loads < loads + 25:  # it still works
                await asyncio.sleep(0)
            report.after = Footprint.now()
            work.cancel()
        statistics = on.producer.runtime.statistics()
        assert statistics.state == "open"
        genuine = {await one.transport.metadata() for one in (on.producer, on.victim)}
        assert on.victim.transport.connected <= genuine, "metadata with a wrong checksum reached the transport"
    report.listener, report.serving = statistics.listener, statistics.serving
    report.seconds = time.monotonic() - started_s
    return report


async def attack(on: Scene, seed: str, messages: int, report: Report) -> None:
    """Run all attackers at once, until they are done and the listener has seen their last message."""
    few, some = max(messages // 50, 1), max(messages // 10, 1)
    rng = Random(seed)
    async with asyncio.TaskGroup() as group:
        senders = [
            group.create_task(send(on, f"{seed} {n}", max((messages - 2 * some - 2 * few) // ATTACKERS, 1)))
            for n in range(ATTACKERS)
        ]
        streams = group.create_task(run(on, send_streams, f"{seed} tcp", port_of(on.producer), some))
        group.create_task(notify(rng, on.producer, some))
        lies = {}
        if on.mode is not Mode.CURVE:
            lies["tickets"] = group.create_task(load_altered_tickets(rng, on.producer, on.victim, few))
            lies["replies"] = group.create_task(ask_a_liar(rng, on.producer, on.victim, few))
    report.sent["messages"] += sum(task.result() for task in senders)
    report.sent["tcp streams"] += streams.result()
    report.sent["notifications"] += some
    for name, task in lies.items():
        report.sent[name] += few
        for error, times in task.result().items():
            report.errors[f"{name}: {error}"] += times
    async with asyncio.timeout(WAIT_S):
        while (now := on.producer.runtime.statistics().listener) is not None and now.connections > 2:  # honest ones
            await asyncio.sleep(0)


async def send(on: Scene, seed: str, count: int) -> int:
    """Messages over ZeroMQ from one attacker."""
    server_key = await key_of(on.producer) if on.mode is Mode.CURVE else b""
    local, port = on.producer.incarnation.host.context.local, port_of(on.producer)
    about = (local.compatibility.fingerprint(), local.cache_shares, REQUEST_BYTES_MAX, count, server_key)
    return await run(on, send_messages, seed, port, *about)


async def run(on: Scene, attacker: Callable[..., int], *arguments: Any) -> int:
    return await asyncio.get_running_loop().run_in_executor(on.attackers, attacker, *arguments)


def port_of(producer: Engine) -> int:
    return int(producer.runtime.address.rpartition(":")[2])


def options(description: str | None, messages: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=messages, help="of all kinds")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    given = options(__doc__, 20_000)
    for mode, share in ((Mode.UNLIMITED, 0.7), (Mode.LIMITS, 0.2), (Mode.CURVE, 0.1)):
        print(mode, asyncio.run(fuzz(int(given.messages * share), given.seed, mode)), flush=True)


if __name__ == "__main__":
    main()
