"""An engine in another process: calls to it, signals, and a check that it leaves nothing behind.

Engines are forked from one server process that has already imported torch, so an engine starts in half a second. NIXL
is loaded after the fork. `fresh` engines are spawned.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from socket import socket, socketpair
from types import ModuleType, SimpleNamespace
from typing import Any, Self
from unittest import mock

import uvloop

from kvflow.bench.child import Environment
from tests.support.engine import EngineSetup, open_engine
from tests.support.steered_loop import SteeredLoop
from tests.support.verbs import LINE_BYTES_MAX, EngineError, described, line, serve

TIMEOUT_S = 60.0
START_TIMEOUT_S = 100.0  # the first start imports everything
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000  # linux/sched.h
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h
TRANSPORTS: Mapping[str, Mapping[str, str]] = {"shm": {}, "tcp": {"UCX_TLS": "tcp"}}


@contextlib.contextmanager
def ending_as_spawned() -> Iterator[None]:
    """At the end, write what C has buffered, such as UCX's log: a child of the server process ends by `_exit`."""
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)


def run_engine(commands: socket, brake: Connection, setup: EngineSetup, environment: Environment) -> None:
    """Run an engine in this process until the verb "quit", or until the test closes its end of the socket."""
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if setup.namespace is not None:
        enter_namespace(setup.namespace)
    with (
        ending_as_spawned(),
        asyncio.Runner(loop_factory=SteeredLoop if setup.steered else uvloop.new_event_loop) as runner,
    ):
        runner.run(_obey(commands, brake, setup))


async def _obey(commands: socket, brake: Connection, setup: EngineSetup) -> None:
    reader, writer = await asyncio.open_connection(sock=commands, limit=LINE_BYTES_MAX)
    async with AsyncExitStack() as stack:
        try:
            engine = await stack.enter_async_context(open_engine(setup, brake))
        except Exception as error:
            writer.write(line(0, error=described(error)))
            raise
        writer.write(line(0, value="ready"))
        await serve(engine, reader, writer, engine.start)
    engine.assert_nothing_left()


def enter_namespace(name: str) -> None:
    """Move this process to a network namespace, with its own /sys, where UCX looks for network devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        failed = (
            libc.setns(namespace.fileno(), _CLONE_NEWNET)
            or libc.unshare(_CLONE_NEWNS)
            or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
            or libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
        )
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


class Call:
    """A command sent to an engine."""

    def __init__(self, engine: EngineProcess, number: int, verb: str) -> None:
        self._engine = engine
        self._number = number
        self._verb = verb

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Wait for the command's value and return it. Raises EngineError if it failed, TimeoutError if it is late."""
        answer = self._engine.wait_for_answer(self._number, f"call {self._verb}", timeout_s)
        if "error" in answer:
            raise EngineError(f"{self._engine.engine_id}: {self._verb}", answer["error"])
        return answer["value"]


class EngineProcess:
    """The process of an engine, which is starting; `ready` waits until it has started."""

    def __init__(self, setup: EngineSetup, environment: Environment, *, fresh: bool = False) -> None:
        self.setup = setup
        self.engine_id = setup.engine_id
        self._commands, commands = socketpair()
        self._answers_in = self._commands.makefile("rb")
        context = multiprocessing.get_context("spawn") if fresh else forking()
        self._brake, brake = context.Pipe()
        self._process = context.Process(
            target=run_engine, args=(commands, brake, setup, environment), name=setup.engine_id, daemon=True
        )
        self._process.start()
        for theirs in (commands, brake):
            theirs.close()
        self._answers: dict[int, dict[str, Any]] = {}
        self._calls = 0
        self._closed = False

    def ready(self) -> EngineProcess:
        """Wait until the engine has started, and return it. Raises EngineError if it cannot start."""
        Call(self, 0, "start").result(START_TIMEOUT_S)
        return self

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "started in __init__"
        return self._process.pid

    def call(self, verb: str, **arguments: Any) -> Any:
        return self.start(verb, **arguments).result()

    def start(self, verb: str, **arguments: Any) -> Call:
        """Send a command without waiting for its end."""
        self._calls += 1
        self._commands.sendall(line(self._calls, verb=verb, arguments=arguments))
        return Call(self, self._calls, verb)

    def wait_for_answer(self, number: int, what: str, timeout_s: float) -> dict[str, Any]:
        until_s = time.monotonic() + timeout_s
        while number not in self._answers:
            self._commands.settimeout(max(until_s - time.monotonic(), 1e-3))
            try:
                said = self._answers_in.readline()
            except TimeoutError:
                raise TimeoutError(f"{self.engine_id}: {what}: no answer within {timeout_s} s") from None
            if not said:
                raise ConnectionError(f"{self.engine_id}: {what}: it is gone, exit code {self.wait_for_exit()}")
            answer = json.loads(said)
            self._answers[answer["call"]] = answer
        return self._answers.pop(number)

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll the engine's statistics until `condition` is true, and return them."""
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            statistics: dict[str, Any] = self.call("statistics")
            if condition(statistics):
                return statistics
            assert time.monotonic() < until_s, f"{self.engine_id}: {statistics}"

    def stall(self, *, hold_gil: bool = False, after_reads: int = 0) -> Call:
        """Tell the engine to block its loop once it has posted `after_reads` more reads; see `wait_until_stalled`."""
        return self.start("stall", hold_gil=hold_gil, after_reads=after_reads)

    def wait_until_stalled(self) -> None:
        assert self._brake.poll(TIMEOUT_S), f"{self.engine_id} never got as far as to stall"
        assert self._brake.recv_bytes() == b"stalled"

    def go_on(self) -> None:
        """End the stall of the engine's loop."""
        self._brake.send_bytes(b"go on")

    def stop(self) -> None:
        """Stop the process by SIGSTOP, and wait until all its threads have stopped."""
        self._signal(signal.SIGSTOP)
        states = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        for state in states:
            while state.read_text().rpartition(")")[2].split()[0] != "T":
                pass

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)

    def close(self) -> None:
        """Kill the process if it still runs, and close its pipes. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        for end in (self._answers_in, self._commands, self._brake, self._process):
            end.close()

    @property
    def running(self) -> bool:
        return not self._closed and self._process.exitcode is None

    def start_to_quit(self) -> None:
        """Tell the engine to close its runtime and exit, without waiting."""
        self.start("quit")

    def wait_for_exit(self) -> int | None:
        """Wait for the process's end and return its exit code; None if it does not end in time."""
        self._process.join(TIMEOUT_S)
        return self._process.exitcode

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)


class Engines:
    """Starts engines with the same environment. At the end of a `with` without error they must exit with code 0."""

    def __init__(self, environment: Environment, *, fresh: bool = False) -> None:
        self._environment, self._fresh = environment, fresh
        self._started: list[EngineProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                running = [engine for engine in self._started if engine.running]
                for engine in running:
                    engine.resume()
                    engine.start("revoke_all")
                    engine.start_to_quit()
                codes = [(engine.engine_id, engine.wait_for_exit()) for engine in running]
                assert codes == [(engine.engine_id, 0) for engine in running]
        finally:
            for engine in self._started:
                engine.close()

    def start(self, *setups: EngineSetup) -> list[EngineProcess]:
        """Start several engines at once, wait until all have started, and return them."""
        new = [EngineProcess(setup, self._environment, fresh=self._fresh) for setup in setups]
        self._started += new
        return [engine.ready() for engine in new]

    def pair(self, **setup: Any) -> list[EngineProcess]:
        """Start a producer with its cache full of 1, and a consumer with its cache full of -1."""
        return self.start(
            EngineSetup(engine_id="producer", fill=1.0, **setup), EngineSetup(engine_id="consumer", fill=-1.0, **setup)
        )


@cache
def forking() -> ForkServerContext:
    """Return the context that forks processes from a server process, which has imported everything but NIXL.

    UCX reads the settings of its log when it is loaded, and importing NIXL takes 30 ms.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "uvloop", "kvflow.runtime.runtime", "tests.support.engine"])
    return context


class ForkingContext:
    """Forks processes that would be spawned: each would import torch, which takes longer than most tests of it."""

    Pipe = staticmethod(multiprocessing.Pipe)

    @staticmethod
    def Process(target: Callable[..., None], args: tuple[Any, ...], **named: Any) -> BaseProcess:  # noqa: N802
        return forking().Process(target=_run_forked, args=(os.getpid(), dict(os.environ), target, args), **named)


def _run_forked(starter: int, inherited: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run `target` with the environment of the process `starter`. The parent here is the server process."""
    os.environ.clear()
    os.environ.update(inherited)
    with ending_as_spawned():
        target(*(os.getppid() if type(argument) is int and argument == starter else argument for argument in args))


@contextlib.contextmanager
def forked_processes(module: ModuleType) -> Iterator[None]:
    """Inside the block, let `module` fork the processes that it would spawn."""
    with mock.patch.object(module, "multiprocessing", SimpleNamespace(get_context=lambda _: ForkingContext)):
        yield
