"""The process of one rank of an engine. It takes calls from the router over a pipe, and answers one after another.

A call is a message, and its answer is a series of values, which ends with None or a Failure:

    PrefillRequest  the ticket of the prompt's blocks; once they are free again, how their lease ended
    DecodeRequest   the report of the load (`Loaded`), then each token
    Generate        each token of an answer by this engine alone

The process has both workers, `prefill` and `decode`, on one engine and one kvflow runtime. It ends when the router
sends None, or dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import Any

import torch
import uvloop
from paged_engine import Engine, OutOfBlocksError
from paged_engine.all_reduce import AllReduce
from paged_engine.sharding import WHOLE, Shard
from paged_engine.weights import load_model

import kvflow
from disaggregated.background import StartTask, background_tasks
from disaggregated.decode import DecodeWorker
from disaggregated.failures import failure_of
from disaggregated.groups import LayerGroups, open_runtime
from disaggregated.messages import DecodeRequest, Failure, Generate, Message, PrefillRequest, Step
from disaggregated.prefill import PrefillWorker

# Errors that a request may meet. Any other error is a bug, and ends the process with its traceback.
EXPECTED_ERRORS = (kvflow.errors.KVFlowError, OutOfBlocksError, ValueError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of a worker, which its process gets when it starts."""

    engine_id: str
    checkpoint: Path
    block_size: int
    block_count: int
    shard: Shard = WHOLE

    @property
    def name(self) -> str:
        """Name of the worker: the engine id, and the rank if the engine has several."""
        return self.engine_id if self.shard.tp_size == 1 else f"{self.engine_id}/{self.shard.tp_rank}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """kvflow's report of a load, and how much was not read because it lies before the window of its layers."""

    report: kvflow.LoadReport
    blocks_left: int
    bytes_left: int


def run_worker(settings: WorkerSettings, router: Connection, peers: Sequence[socket]) -> None:
    """Run a worker in this process until the router sends None or closes its end. `peers` go to the other ranks."""
    # All workers share the machine's cores, and with one thread sums are rounded the same everywhere.
    torch.set_num_threads(1)
    with closing(AllReduce(settings.shard.tp_rank, peers)) as all_reduce:
        uvloop.run(_run(settings, router, all_reduce))


async def _run(settings: WorkerSettings, router: Connection, all_reduce: AllReduce) -> None:
    with _failures_sent(router):
        model = load_model(settings.checkpoint, settings.shard, reduce=all_reduce)
        config = kvflow.Config(
            engine_id=settings.engine_id,
            tp_rank=settings.shard.tp_rank,
            tp_size=settings.shard.tp_size,
            listen="tcp://127.0.0.1:0",
            model=model.config.name,
        )
        # The runtime closes before the engine, because it uses the engine's memory.
        async with (
            Engine(
                model,
                block_count=settings.block_count,
                block_size=settings.block_size,
                # Scatter the blocks, differently in each engine, as in a real engine after some use. All ranks of an
                # engine scatter them alike, because they must use the same blocks.
                shuffle_seed=settings.engine_id,
            ) as engine,
            open_runtime(config, engine) as runtime,
            background_tasks() as start_task,
        ):
            # A task of its own: when the router leaves, only this is cancelled, and all else is closed in order.
            serving = asyncio.create_task(_serve(router, _Worker(engine, runtime, start_task)), name="serve")
            await asyncio.wait([serving])
            if not serving.cancelled():
                serving.result()


async def _serve(router: Connection, worker: _Worker) -> None:
    """Answer the router's calls. When it leaves, cancel this task."""
    calls = asyncio.Queue[Message]()
    loop, this = asyncio.get_running_loop(), asyncio.current_task()

    def receive() -> None:
        call = None
        with suppress(EOFError, OSError):
            call = router.recv()
        if call is not None:
            calls.put_nowait(call)
        else:
            loop.remove_reader(router.fileno())
            assert this is not None, "a coroutine runs in a task"
            this.cancel()

    loop.add_reader(router.fileno(), receive)
    _send(router, None)
    while True:
        call = await calls.get()
        with _failures_sent(router):
            async with aclosing(worker.answer(call)) as values:
                async for value in values:
                    _send(router, value)
                    if isinstance(value, Failure):
                        break
                else:
                    _send(router, None)


class _Worker:
    """Answers the router's calls."""

    def __init__(self, engine: Engine, runtime: kvflow.Runtime, start_task: StartTask) -> None:
        self._engine = engine
        self._groups = LayerGroups(engine)
        self._prefill = PrefillWorker(engine, runtime, start_task)
        self._decode = DecodeWorker(engine, runtime, start_task)

    async def answer(self, call: Message) -> AsyncGenerator[Any, None]:
        match call:
            case PrefillRequest():
                lease = await self._prefill.prefill(call)
                yield lease.ticket.to_params()
                await self._prefill.wait_released(call.request_id)
                yield await lease
            case DecodeRequest():
                async with aclosing(await self._decode.decode(call)) as generation:
                    loaded = False
                    async for step in generation.steps():
                        if not loaded and isinstance(step, Step):
                            loaded = True
                            yield Loaded(generation.report, *self._groups.skipped(call.prompt_count))
                        yield step.token if isinstance(step, Step) else step
                    # All ranks have freed their blocks before any rank gets another call.
                    await generation.ended()
            case Generate():
                async with aclosing(self._engine.generate(call.prompt, max_tokens=call.max_tokens)) as tokens:
                    async for token in tokens:
                        yield token


@contextmanager
def _failures_sent(router: Connection) -> Iterator[None]:
    """Send a Failure to the router for an expected error in the block."""
    try:
        yield
    except EXPECTED_ERRORS as error:
        _send(router, failure_of(error))


def _send(router: Connection, value: object) -> None:
    with suppress(OSError):  # the router has left, and `_serve` ends this worker
        router.send(value)
