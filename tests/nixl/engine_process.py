"""A kvflow engine in a process of its own, commanded over a pipe: what the tests on real NIXL talk to."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import uvloop

BLOCK_SIZE = 16
TIMEOUT_S = 60.0


class EngineProcess:
    """The test's end of an engine. Calls raise what the engine raised."""

    def __init__(self, engine_id: str, environment: Mapping[str, str], num_blocks: int, fill: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(theirs, engine_id, num_blocks, fill), daemon=True)
        with _environment(environment):
            self.process.start()
        theirs.close()

    def call(self, verb: str, *arguments: Any) -> Any:
        self.send(verb, *arguments)
        return self.receive()

    def send(self, verb: str, *arguments: Any) -> None:
        self._pipe.send((verb, arguments))

    def receive(self) -> Any:
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"{self.process.name}: no answer within {TIMEOUT_S} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise value
        return value

    def quit(self) -> int | None:
        """End it in order; its exit code."""
        self.send("quit")
        self.process.join(TIMEOUT_S)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes, UCX_LOG_LEVEL="error", NIXL_LOG_LEVEL="ERROR")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _main(pipe: Connection, engine_id: str, num_blocks: int, fill: float) -> None:
    uvloop.run(_Engine(pipe, engine_id, num_blocks, fill).run())


class _Engine:
    def __init__(self, pipe: Connection, engine_id: str, num_blocks: int, fill: float) -> None:
        import torch

        self._pipe = pipe
        self._engine_id = engine_id
        shape = (2, num_blocks, 4, BLOCK_SIZE, 64)
        self._caches = {f"layers.{index}": torch.full(shape, fill, dtype=torch.float16) for index in range(4)}
        self._leases: dict[str, Any] = {}

    async def run(self) -> None:
        import kvflow

        config = kvflow.Config(
            engine_id=self._engine_id, listen="tcp://127.0.0.1:0", drain_timeout_s=1.0, handshake_timeout_s=10.0
        )
        async with kvflow.Runtime(config) as self._runtime:
            layout = kvflow.CacheLayout.infer(self._caches, order="HND", block_size=BLOCK_SIZE)
            await self._runtime.register_kv_caches(self._caches, layout)
            self._pipe.send(("ok", "ready"))
            while True:
                verb, arguments = await asyncio.to_thread(self._pipe.recv)
                if verb == "quit":
                    break
                await self._answer(verb, arguments)
        statistics = self._runtime.statistics()
        left = statistics.transport.open_threads + statistics.tasks
        threads = [thread.name for thread in threading.enumerate() if "kvflow" in thread.name]
        if left or threads:
            raise SystemExit(f"left behind: {statistics}, {threads}")

    async def _answer(self, verb: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = await getattr(self, f"do_{verb}")(*arguments)
        except Exception as error:  # noqa: BLE001 - it is the test that judges it
            self._pipe.send(("error", RuntimeError(f"{type(error).__name__}: {error}")))
        else:
            self._pipe.send(("ok", value))

    async def do_offer(self, request_id: str, block_ids: list[int], ttl_s: float | None = None) -> dict[str, Any]:
        import kvflow

        request = kvflow.ServeRequest(request_id, block_ids, len(block_ids) * BLOCK_SIZE, ttl_s=ttl_s)
        self._leases[request_id] = self._runtime.serve_blocks(request)
        return self._leases[request_id].ticket.to_params()

    async def do_outcome(self, request_id: str) -> str:
        return str(await self._leases.pop(request_id))

    async def do_load(self, request_id: str, ticket: dict[str, Any], block_ids: list[int]) -> tuple[int, int]:
        import kvflow

        report = await self._runtime.load_blocks(kvflow.LoadRequest(request_id, ticket, block_ids, deadline_s=30.0))
        return report.bytes, report.descriptors

    async def do_fill(self, block_ids: list[int], value: float) -> None:
        for tensor in self._caches.values():
            tensor[:, block_ids] = value

    async def do_values(self, block_ids: list[int]) -> list[float]:
        """For each block the one value that fills it, or nan."""
        values = []
        for block in block_ids:
            found = {value for tensor in self._caches.values() for value in tensor[:, block].unique().tolist()}
            values.append(found.pop() if len(found) == 1 else float("nan"))
        return values

    async def do_statistics(self) -> Any:
        return self._runtime.statistics()

    async def do_block_the_loop(self) -> str:
        """Stop the event loop, as an engine's long step does, until the test sends anything."""
        self._pipe.send(("ok", "blocked"))
        self._pipe.recv()
        return "back"
