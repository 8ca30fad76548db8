"""One rank of an engine in a process of its own: the engine computes, kvflow moves its blocks, the router commands.

This is the part to read if you want to use kvflow: `_Worker.prefill` offers blocks and keeps them until they were read,
`_Worker.decode` loads them and goes on from there. Whose blocks are meanwhile is the affair of `keeper`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, suppress
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
from disaggregated.channel import Channel, ChannelClosedError
from disaggregated.groups import LayerGroups
from disaggregated.keeper import BlockKeeper, background_tasks
from disaggregated.messages import (
    Command,
    Decode,
    Done,
    Event,
    Failed,
    Generate,
    Loaded,
    Prefill,
    Prefilled,
    Ready,
    Released,
    Token,
)

# What a request may run into; anything else is a bug and ends the process with its traceback.
EXPECTED_ERRORS = (kvflow.errors.KVFlowError, OutOfBlocksError, ValueError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything a worker is told when it is started; crosses the process border."""

    engine_id: str
    checkpoint: Path
    block_size: int
    block_count: int
    shard: Shard = WHOLE

    @property
    def name(self) -> str:
        """The worker's own name: the rank counts only where there are several."""
        return self.engine_id if self.shard.tp_size == 1 else f"{self.engine_id}/{self.shard.tp_rank}"


def run_worker(settings: WorkerSettings, sock: socket.socket, peers: Sequence[socket.socket]) -> None:
    """The whole life of a worker process: until the router closes its end of the socket."""
    # All workers share the machine's cores, and one thread gives the same sums everywhere.
    torch.set_num_threads(1)
    with closing(AllReduce(settings.shard.tp_rank, peers)) as all_reduce:
        uvloop.run(_live(settings, sock, all_reduce))


async def _live(settings: WorkerSettings, sock: socket.socket, all_reduce: AllReduce) -> None:
    decoder = msgspec.json.Decoder[Command](Command)
    async with (
        await Channel[Command, Event].open(sock, decoder) as channel,
        _failures_reported(channel),
        _started(settings, channel, all_reduce) as worker,
    ):
        await channel.send(Ready())
        await worker.serve()


@asynccontextmanager
async def _started(
    settings: WorkerSettings, channel: Channel[Command, Event], all_reduce: AllReduce
) -> AsyncIterator[_Worker]:
    """An engine, and a runtime that knows its cache. The runtime goes first: it uses the engine's memory."""
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
            # Scattered blocks, different ones in each engine: what a real engine's cache looks like.
            # The ranks of one engine scatter them alike, for they use the same blocks.
            shuffle_seed=settings.engine_id,
        ) as engine,
        kvflow.Runtime(config) as runtime,
        background_tasks() as start_task,
    ):
        worker = _Worker(engine, runtime, BlockKeeper(runtime, start_task), channel)
        await runtime.register_kv_caches(worker.groups.caches)
        yield worker


class _Worker:
    """Answers the router's commands, each in a task of its own."""

    def __init__(
        self, engine: Engine, runtime: kvflow.Runtime, keeper: BlockKeeper, channel: Channel[Command, Event]
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._keeper = keeper
        self._channel = channel
        self.groups = LayerGroups(engine)

    async def serve(self) -> None:
        """Take commands until the router hangs up, then drop what it no longer waits for."""
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
        async with _failures_reported(self._channel):
            match command:
                case Prefill():
                    await self.prefill(command)
                case Decode():
                    await self.decode(command)
                case Generate():
                    await self.generate(command)

    async def prefill(self, command: Prefill) -> None:
        """Compute the prompt and keep its blocks until the decode engine has read them."""
        async with AsyncExitStack() as blocks:
            block_ids = await blocks.enter_async_context(self._engine.reserve(len(command.prompt)))
            token = await self._engine.prefill(command.prompt, block_ids)
            lease = self._runtime.serve_blocks(
                kvflow.ServeRequest(
                    command.request_id,
                    block_ids=self.groups.tables(block_ids, len(command.prompt)),
                    num_tokens=len(command.prompt),
                )
            )
            freed = self._keeper.keep(lease, blocks)
        try:
            await self._channel.send(Prefilled(token=token, ticket=lease.ticket.to_params()))
            outcome = await lease
        finally:
            lease.revoke()  # has no effect on a lease that has ended
            await asyncio.shield(freed)
        await self._channel.send(Released(outcome=outcome.value))

    async def decode(self, command: Decode) -> None:
        """Load the prompt's blocks instead of computing them, and generate from there."""
        async with AsyncExitStack() as blocks:
            room = self._engine.reserve(command.prompt_count + command.max_tokens)
            block_ids = await blocks.enter_async_context(room)
            tables = self.groups.tables(block_ids, command.prompt_count)
            request = kvflow.LoadRequest(command.request_id, ticket=command.ticket, block_ids=tables)
            report = await self._keeper.load(request, blocks)
            await self._channel.send(_loaded(report, *self.groups.left(command.prompt_count)))
            await self._stream(
                self._engine.decode(
                    command.token,
                    position=command.prompt_count,
                    block_ids=block_ids,
                    max_tokens=command.max_tokens,
                )
            )
        # Last, as in every answer: then all ranks have given back their blocks before any gets another command.
        await self._channel.send(Done())

    async def generate(self, command: Generate) -> None:
        """Prefill and decode right here: the same engine without hand-over."""
        await self._stream(self._engine.generate(command.prompt, max_tokens=command.max_tokens))
        await self._channel.send(Done())

    async def _stream(self, generated: AsyncGenerator[int, None]) -> None:
        async with aclosing(generated) as tokens:
            async for token in tokens:
                await self._channel.send(Token(token=token))


@asynccontextmanager
async def _failures_reported(channel: Channel[Command, Event]) -> AsyncIterator[None]:
    """Tell the router what went wrong; when it is gone there is nobody to tell."""
    try:
        yield
    except ChannelClosedError:
        pass
    except EXPECTED_ERRORS as error:
        with suppress(ChannelClosedError):
            await channel.send(Failed(error=f"{type(error).__name__}: {error}"))


def _loaded(report: kvflow.LoadReport, blocks_left: int, size_left: int) -> Loaded:
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
