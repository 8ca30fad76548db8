"""The router's process: it picks two workers for each attempt, and asks them over HTTP.

A worker counts as down when a connection to it fails, and as up again when it answers /health. If no worker of a role
is up, requests wait for one. Offered blocks that will not be loaded are released.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Collection, Hashable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
from disaggregated.messages import AnswerRequest, DecodeRequest, Failure, FailureKind, Offered, PrefillRequest, Step
from paged_engine.tokenizer import ChatTokenizer

from openai_server.attempts import AttemptError
from openai_server.front import Front, front_app
from openai_server.http_io import CLIENT_KEEP_ALIVE_S, serve_http
from openai_server.metrics import FrontMetrics
from openai_server.replies import Reply

logger = logging.getLogger(__name__)

ROLES = ("prefill", "decode")
WORKER_WAIT_S = 30.0
"""Maximum time for which a request waits if no worker is up."""
PROBE_S = 0.5
RELEASE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
MESSAGES: dict[str, msgspec.json.Decoder[Offered | Step | Failure]] = {
    "prefill": msgspec.json.Decoder[Offered | Step | Failure](Offered | Failure),
    "decode": msgspec.json.Decoder[Offered | Step | Failure](Step | Failure),
}


@dataclass(slots=True, eq=False)
class Worker:
    """One worker as the router knows it."""

    name: str
    role: str
    url: str
    up: bool = False
    address: str = ""
    """Address of its kvflow runtime."""


class Router:
    """Makes attempts, each with a prefill and a decode worker. Workers of a role are picked in turn."""

    def __init__(
        self, workers: list[Worker], client: aiohttp.ClientSession, tasks: asyncio.TaskGroup, *, share: bool
    ) -> None:
        self.workers = workers
        self._client = client
        self._tasks = tasks
        self._share = share
        self._came_up = asyncio.Event()

    def up(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.up and worker.role == role]

    async def attempt(self, request: AnswerRequest, avoid: set[Hashable]) -> AsyncGenerator[Step, None]:
        """Make one attempt and yield its steps. See `attempts.Attempt`."""
        prefill, decode = await self._pick("prefill", avoid), await self._pick("decode", avoid)
        neighbours = [one.address for one in self.up("prefill") if one is not prefill] if self._share else []
        read = False
        try:
            async with aclosing(self._ask(prefill, request.prefill_request(neighbours), prefill)) as offers:
                offered = await anext(offers)
            async with aclosing(self._ask(decode, request.decode_request(offered.ticket), prefill)) as steps:
                async for step in steps:
                    read = True  # the first token comes with the last block
                    yield step
                    if step.finish_reason is not None:
                        return
        finally:
            if not read:
                name = f"release {request.request_id}"
                self._tasks.create_task(self._release(prefill, request.request_id), name=name)

    async def _pick(self, role: str, avoid: Collection[Hashable]) -> Worker:
        """Wait until a worker is up, and return one, not in `avoid` if possible. Raises AttemptError."""
        try:
            async with asyncio.timeout(WORKER_WAIT_S):
                while not (up := self.up(role)):
                    self._came_up.clear()
                    await self._came_up.wait()
        except TimeoutError:
            message = f"no {role} worker is up, nor came back within {WORKER_WAIT_S:g} s; try again"
            raise AttemptError(Failure(kind=FailureKind.NO_WORKER, message=message)) from None
        worker = next((one for one in up if one not in avoid), up[0])
        self.workers.remove(worker)
        self.workers.append(worker)
        return worker

    async def _ask(
        self, worker: Worker, request: PrefillRequest | DecodeRequest, prefill: Worker
    ) -> AsyncGenerator[Any, None]:
        """Ask a worker, and yield the messages of its answer, a line of JSON each.

        Raises AttemptError if the connection fails, for a Failure among the messages, and at the end of the answer.
        """
        try:
            async with self._client.post(f"{worker.url}/{worker.role}", data=request.written()) as response:
                async for line in response.content:
                    message = MESSAGES[worker.role].decode(line)
                    if isinstance(message, Failure):
                        at_fault = prefill if message.kind is FailureKind.PREFILL_AGAIN else worker
                        if message.kind is not FailureKind.INVALID:  # that one is for the client, who knows no workers
                            message = Failure(kind=message.kind, message=f"{worker.name}: {message.message}")
                        raise AttemptError(message, at_fault)
                    yield message
            kind, why = FailureKind.WORKER_FAILED, "ended its answer early"
        except msgspec.DecodeError as error:
            kind, why = FailureKind.WORKER_FAILED, f"sent an invalid answer ({response.status}): {error}"
        except aiohttp.ClientError as error:
            self.note_health(worker, {})
            kind, why = FailureKind.WORKER_LOST, f"was lost: {type(error).__name__} {error}".rstrip()
        raise AttemptError(Failure(kind=kind, message=f"{worker.name} {why}"), worker)

    async def _release(self, worker: Worker, request_id: str) -> None:
        """Withdraw an offer. If its worker cannot be reached, the lease expires by itself."""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._client.delete(f"{worker.url}/prefill/{request_id}", timeout=RELEASE_TIMEOUT):
                pass

    async def watch(self, worker: Worker) -> None:
        """Poll a worker's /health for ever."""
        while True:
            reply: Reply = {}
            with suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async with self._client.get(f"{worker.url}/health", timeout=PROBE_TIMEOUT) as response:
                    reply = json.loads(await response.read()) if response.status == HTTPStatus.OK else {}
            self.note_health(worker, reply)
            await asyncio.sleep(PROBE_S)

    def note_health(self, worker: Worker, reply: Reply) -> None:
        """Note a worker's reply to /health; an empty `reply` marks the worker as down."""
        if bool(reply) is not worker.up:
            logger.info("%s is %s", worker.name, "up" if reply else "down")
        worker.up, worker.address = bool(reply), reply.get("address", worker.address)
        if reply:
            self._came_up.set()

    def health(self) -> Reply:
        """Return "ok" if all workers are up, "degraded" if some of each role are, else "down"."""
        whole, usable = all(worker.up for worker in self.workers), all(map(self.up, ROLES))
        return {
            "status": "ok" if whole else "degraded" if usable else "down",
            "workers": [
                {"name": worker.name, "role": worker.role, "url": worker.url, "up": worker.up}
                for worker in sorted(self.workers, key=lambda worker: worker.name)
            ],
        }


async def run_router(options: argparse.Namespace) -> None:
    """Run the router until SIGTERM or Ctrl-C. `options.prefill` and `options.decode` are workers' names and URLs."""
    metrics = FrontMetrics()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)  # a request's deadline bounds its reads
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client, asyncio.TaskGroup() as tasks:
        workers = [Worker(name, role, url) for role in ROLES for name, url in getattr(options, role)]
        router = Router(workers, client, tasks, share=options.share_prefixes)
        watching = [tasks.create_task(router.watch(one), name=f"watch {one.name}") for one in workers]
        for role in ROLES:
            metrics.up.labels(role).set_function(lambda role=role: len(router.up(role)))  # type: ignore[misc]
        front = Front(
            attempt=router.attempt,
            tokenizer=ChatTokenizer(options.checkpoint),
            metrics=metrics,
            deadline_s=options.deadline_s,
            health=router.health,
        )
        await serve_http(front_app(front), options.host, options.port)
        for task in watching:
            task.cancel()
