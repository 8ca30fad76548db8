"""The router's process: it picks two workers for each attempt, and asks them over HTTP.

A worker counts as down when a connection to it fails, and as up again when it answers /health. If no worker of a role
is up, requests wait for one. Offered blocks that will not be loaded are released.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp
import msgspec
from disaggregated.messages import Failure, FailureKind, Offered, Step
from paged_engine.tokenizer import ChatTokenizer

from openai_server.attempts import AttemptError, Prompt
from openai_server.front import Front, front_app
from openai_server.http_io import CLIENT_KEEP_ALIVE_S, serve_http
from openai_server.metrics import FrontMetrics
from openai_server.replies import Reply

logger = logging.getLogger(__name__)

WORKER_WAIT_S = 30.0
"""Maximum time for which a request waits if no worker is up."""
PROBE_S = 0.5
RELEASE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
LINE = msgspec.json.Decoder(Step | Failure)


@dataclass(slots=True, eq=False)
class Worker:
    """One worker as the router knows it."""

    name: str
    url: str
    up: bool = False
    address: str = ""
    """Address of its kvflow runtime."""


class Workers:
    """The workers of one role, picked in turn."""

    def __init__(self, role: str, urls: Mapping[str, str]) -> None:
        self.role = role
        self.all = [Worker(name, url) for name, url in urls.items()]
        self._came_up = asyncio.Event()

    @property
    def up(self) -> list[Worker]:
        return [worker for worker in self.all if worker.up]

    async def pick(self, avoid: Collection[Hashable]) -> Worker:
        """Wait until a worker is up, and return one, not in `avoid` if possible. Raises AttemptError."""
        try:
            async with asyncio.timeout(WORKER_WAIT_S):
                while not (up := self.up):
                    self._came_up.clear()
                    await self._came_up.wait()
        except TimeoutError:
            message = f"no {self.role} worker is up, nor came back within {WORKER_WAIT_S:g} s; try again"
            raise AttemptError(Failure(kind=FailureKind.NO_WORKER, message=message)) from None
        worker = next((one for one in up if one not in avoid), up[0])
        self.all.remove(worker)
        self.all.append(worker)
        return worker

    async def watch(self, client: aiohttp.ClientSession, worker: Worker) -> None:
        """Poll a worker's /health for ever."""
        while True:
            reply: Reply = {}
            with suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async with client.get(f"{worker.url}/health", timeout=PROBE_TIMEOUT) as response:
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


class Router:
    """Makes attempts, each with a prefill and a decode worker."""

    def __init__(
        self, prefill: Workers, decode: Workers, client: aiohttp.ClientSession, tasks: asyncio.TaskGroup, *, share: bool
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self._client = client
        self._tasks = tasks
        self._share = share

    async def attempt(self, request_id: str, prompt: Prompt, avoid: set[Hashable]) -> AsyncGenerator[Step, None]:
        """Make one attempt and yield its steps. See `attempts.Attempt`."""
        prefill, decode = await self.prefill.pick(avoid), await self.decode.pick(avoid)
        read = False
        try:
            offered = await self._request_offer(prefill, request_id, prompt)
            asked = prompt.decode_request(request_id, offered.ticket).written()
            with self._as_attempt_errors(self.decode, decode):
                async with self._client.post(f"{decode.url}/decode", data=asked) as response:
                    if response.status != HTTPStatus.OK:
                        raise _attempt_error(
                            _failure_in(await response.read(), response.status, decode), prefill, decode
                        )
                    async for line in response.content:
                        step = LINE.decode(line)
                        if isinstance(step, Failure):
                            raise _attempt_error(step, prefill, decode)
                        read = True  # the first token comes with the last block
                        yield step
                        if step.finish_reason is not None:
                            return
            message = f"{decode.name} ended its answer early"
            raise AttemptError(Failure(kind=FailureKind.WORKER_FAILED, message=message), decode)
        finally:
            if not read:
                self._tasks.create_task(self._release(prefill, request_id), name=f"release {request_id}")

    async def _request_offer(self, prefill: Worker, request_id: str, prompt: Prompt) -> Offered:
        neighbours = [one.address for one in self.prefill.up if one is not prefill] if self._share else []
        asked = prompt.prefill_request(request_id, neighbours).written()
        with self._as_attempt_errors(self.prefill, prefill):
            async with self._client.post(f"{prefill.url}/prefill", data=asked) as response:
                body = await response.read()
            if response.status != HTTPStatus.OK:
                raise AttemptError(_failure_in(body, response.status, prefill), prefill)
            return Offered.read(body)

    @contextmanager
    def _as_attempt_errors(self, workers: Workers, worker: Worker) -> Iterator[None]:
        """Translate errors of asking `worker` into AttemptError.

        If the connection fails, the worker is marked as down; if its answer cannot be decoded, the worker has failed.
        """
        try:
            yield
        except msgspec.DecodeError as error:
            message = f"{worker.name} sent an invalid answer: {error}"
            raise AttemptError(Failure(kind=FailureKind.WORKER_FAILED, message=message), worker) from error
        except aiohttp.ClientError as error:
            workers.note_health(worker, {})
            message = f"{worker.name} was lost: {type(error).__name__} {error}".rstrip()
            raise AttemptError(Failure(kind=FailureKind.WORKER_LOST, message=message), worker) from error

    async def _release(self, worker: Worker, request_id: str) -> None:
        """Withdraw an offer. If its worker cannot be reached, the lease expires by itself."""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._client.delete(f"{worker.url}/prefill/{request_id}", timeout=RELEASE_TIMEOUT):
                pass

    def health(self) -> Reply:
        """Return "ok" if all workers are up, "degraded" if some of each role are, else "down"."""
        roles = (self.prefill, self.decode)
        listed = [
            {"name": worker.name, "role": role.role, "url": worker.url, "up": worker.up}
            for role in roles
            for worker in role.all
        ]
        whole = all(worker["up"] for worker in listed)
        return {
            "status": "ok" if whole else "degraded" if all(role.up for role in roles) else "down",
            "workers": listed,
        }


def _attempt_error(failure: Failure, prefill: Worker, decode: Worker) -> AttemptError:
    """Return the error for a failure of the decode worker. If the load failed, the prefill worker should be avoided."""
    return AttemptError(failure, prefill if failure.kind is FailureKind.PREFILL_AGAIN else decode)


def _failure_in(body: bytes, status: int, worker: Worker) -> Failure:
    """Decode the failure in a worker's answer. If it cannot be decoded, return WORKER_FAILED."""
    try:
        failure = Failure.read(body)
    except msgspec.DecodeError:
        return Failure(kind=FailureKind.WORKER_FAILED, message=f"{worker.name} answered {status}")
    if failure.kind is FailureKind.INVALID:  # the client's fault, and its message is for the client
        return failure
    return Failure(kind=failure.kind, message=f"{worker.name}: {failure.message}")


async def run_router(
    listening: socket.socket,
    checkpoint: Path,
    *,
    deadline_s: float,
    prefill: Mapping[str, str],
    decode: Mapping[str, str],
    share: bool,
) -> None:
    """Run the router until SIGTERM or Ctrl-C. `prefill` and `decode` are the workers' URLs by name."""
    metrics = FrontMetrics()
    roles = Workers("prefill", prefill), Workers("decode", decode)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)  # a request's deadline bounds its reads
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client, asyncio.TaskGroup() as tasks:
        watching = [
            tasks.create_task(role.watch(client, worker), name=f"watch {worker.name}")
            for role in roles
            for worker in role.all
        ]
        for role in roles:
            metrics.watch_workers(role.role, lambda role=role: len(role.up))  # type: ignore[misc]
        router = Router(*roles, client, tasks, share=share)
        front = Front(
            attempt=router.attempt,
            tokenizer=ChatTokenizer(checkpoint),
            metrics=metrics,
            deadline_s=deadline_s,
            health=router.health,
        )
        await serve_http(front_app(front), listening)
        for task in watching:
            task.cancel()
