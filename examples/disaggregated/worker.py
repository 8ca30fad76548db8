"""The process of one rank of an engine: it takes commands from the router over a socket.

The process has both workers, `prefill` and `decode`, on one engine and one kvflow runtime.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import uvloop
from paged_engine import Engine, OutOfBlocksError
from paged_engine.all_reduce import AllReduce
from paged_engine.sharding import WHOLE, Shard
from paged_engine.weights import load_model

import kvflow
from disaggregated.background import StartTask, background_tasks
from disaggregated.channel import Channel, ChannelClosedError
from disaggregated.decode import DecodeWorker
from disaggregated.failures import failure_of
from disaggregated.groups import LayerGroups, open_runtime
from disaggregated.messages import (
    Command,
    DecodeRequest,
    Done,
    Event,
    Generate,
    Loaded,
    Offered,
    PrefillRequest,
    Ready,
    Released,
    Step,
)
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


def run_worker(settings: WorkerSettings, sock: socket.socket, peers: Sequence[socket.socket]) -> None:
    """Run a worker in this process until the router closes its end of the socket. `peers` go to the other ranks."""
    # All workers share the machine's cores, and with one thread sums are rounded the same everywhere.
    torch.set_num_threads(1)
    with closing(AllReduce(settings.shard.tp_rank, peers)) as all_reduce:
        uvloop.run(_run(settings, sock, all_reduce))


async def _run(settings: WorkerSettings, sock: socket.socket, all_reduce: AllReduce) -> None:
    decoder = msgspec.json.Decoder[Command](Command)
    async with (
        await Channel[Command, Event].open(sock, decoder) as channel,
        _report_failures(channel),
        _open_worker(settings, channel, all_reduce) as worker,
    ):
        await channel.send(Ready())
        await worker.serve()


@asynccontextmanager
async def _open_worker(
    settings: WorkerSettings, channel: Channel[Command, Event], all_reduce: AllReduce
) -> AsyncIterator[_Worker]:
    """Open an engine, a runtime with the engine's cache, and background tasks; yield the worker.

    The runtime closes before the engine, because it uses the engine's memory.
    """
    model = load_model(settings.checkpoint, settings.shard, reduce=all_reduce)
    config = kvflow.Config(
        engine_id=settings.engine_id,
        tp_rank=settings.shard.tp_rank,
        tp_size=settings.shard.tp_size,
        listen="tcp://127.0.0.1:0",
        model=model.config.name,
    )
    async with (
        Engine(
            model,
            block_count=settings.block_count,
            block_size=settings.block_size,
            # Scatter the blocks, differently in each engine, as in a real engine after some use. All ranks of an engine
            # scatter them alike, because they must use the same blocks.
            shuffle_seed=settings.engine_id,
        ) as engine,
        open_runtime(config, engine) as runtime,
        background_tasks() as start_task,
    ):
        yield _Worker(engine, runtime, start_task, channel)


class _Worker:
    """Runs the router's commands, each in its own task."""

    def __init__(
        self, engine: Engine, runtime: kvflow.Runtime, start_task: StartTask, channel: Channel[Command, Event]
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._groups = LayerGroups(engine)
        self._prefill = PrefillWorker(engine, runtime, start_task)
        self._decode = DecodeWorker(engine, runtime, start_task)

    async def serve(self) -> None:
        """Take commands until the router closes the channel, then cancel the commands that still run."""
        async with asyncio.TaskGroup() as group:
            answering: set[asyncio.Task[None]] = set()
            async for command in self._commands():
                task = group.create_task(self._answer(command), name=f"answer {type(command).__name__}")
                answering.add(task)
                task.add_done_callback(answering.discard)
            for task in answering:
                task.cancel()

    async def _commands(self) -> AsyncIterator[Command]:
        while True:
            try:
                yield await self._channel.receive()
            except ChannelClosedError:
                return

    async def _answer(self, command: Command) -> None:
        async with _report_failures(self._channel):
            match command:
                case PrefillRequest():
                    await self._run_prefill(command)
                case DecodeRequest():
                    await self._run_decode(command)
                case Generate():
                    await self._run_generate(command)

    async def _run_prefill(self, request: PrefillRequest) -> None:
        """Send the ticket of the prompt's blocks, and, when their lease has ended, its outcome."""
        lease = await self._prefill.prefill(request)
        await self._channel.send(Offered(ticket=lease.ticket.to_params()))
        await self._prefill.wait_released(request.request_id)
        await self._channel.send(Released(outcome=await lease))

    async def _run_decode(self, request: DecodeRequest) -> None:
        """Send the report of the load, then each step, then Done."""
        async with aclosing(await self._decode.decode(request)) as generation:
            count = 0
            async for step in generation.steps():
                if isinstance(step, Step) and not count:
                    await self._channel.send(self._loaded_event(request, generation.report))
                await self._channel.send(step)
                count += isinstance(step, Step)
            # Done comes last, in every answer: then all ranks have freed their blocks before any gets another command.
            await generation.ended()
        if count:
            await self._channel.send(Done())

    def _loaded_event(self, request: DecodeRequest, report: kvflow.LoadReport) -> Loaded:
        blocks_left, size_left = self._groups.skipped(request.prompt_count)
        return Loaded(
            sources=list(report.sources),
            blocks=report.blocks,
            descriptors=report.descriptors,
            size=report.bytes,
            blocks_left=blocks_left,
            size_left=size_left,
            seconds=dict(report.seconds),
            total_s=report.total_s,
        )

    async def _run_generate(self, command: Generate) -> None:
        """Prefill and decode on this engine, without a hand-over, and send each step."""
        async with aclosing(self._engine.generate(command.prompt, max_tokens=command.max_tokens)) as tokens:
            async for token in tokens:
                await self._channel.send(Step(token=token))
        await self._channel.send(Done())


@asynccontextmanager
async def _report_failures(channel: Channel[Command, Event]) -> AsyncIterator[None]:
    """Send a Failure to the router for an expected error in the block. Do nothing if the router has left."""
    try:
        yield
    except ChannelClosedError:
        pass
    except EXPECTED_ERRORS as error:
        with suppress(ChannelClosedError):
            await channel.send(failure_of(error))
