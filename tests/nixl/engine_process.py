"""The test's end of an engine in a process of its own (`engine_main`): calls, signals, and what is left at the end.

Engines are forked from one server process that has imported everything before, so one starts in half a second; no
NIXL agent exists before the fork.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

from engine_main import EngineSetup, run_engine

TIMEOUT_S = 60.0
START_TIMEOUT_S = 100.0  # the first start imports everything
TRANSPORTS: Mapping[str, Mapping[str, str]] = {"shm": {}, "tcp": {"UCX_TLS": "tcp"}}


class EngineError(Exception):
    """What an engine answered in place of a value: an error of kvflow, by the name of its type."""

    def __init__(self, engine_id: str, verb: str, described: dict[str, Any]) -> None:
        super().__init__(f"{engine_id}: {verb}: {described['kind']}: {described['text']}")
        self.kind: str = described["kind"]
        self.phase: str | None = described["phase"]
        self.quarantined: list[int] = described["quarantined"]


class Call:
    """One command that an engine was given."""

    def __init__(self, engine: EngineProcess, number: int, verb: str) -> None:
        self._engine = engine
        self._number = number
        self._verb = verb

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Its value. Raises EngineError, or TimeoutError: then the engine has broken a bound."""
        answer = self._engine.wait_for_answer(self._number, f"call {self._verb}", timeout_s)
        if "error" in answer:
            raise EngineError(self._engine.engine_id, self._verb, answer["error"])
        return answer["value"]


class EngineProcess:
    """An engine that is being started; `ready` waits for it."""

    def __init__(self, setup: EngineSetup, environment: Mapping[str, str]) -> None:
        self.setup = setup
        self.engine_id = setup.engine_id
        self._commands, commands = socket.socketpair()
        self._answers_in = self._commands.makefile("rb")
        self._brake, brake = _context().Pipe()
        self._process = _context().Process(
            target=run_engine, args=(commands, brake, setup, environment), name=setup.engine_id, daemon=True
        )
        self._process.start()
        for theirs in (commands, brake):
            theirs.close()
        self._answers: dict[int, dict[str, Any]] = {}
        self._calls = 0
        self._closed = False

    def ready(self) -> EngineProcess:
        self.wait_for_answer(0, "start", START_TIMEOUT_S)
        return self

    def call(self, verb: str, **arguments: Any) -> Any:
        return self.start(verb, **arguments).result()

    def start(self, verb: str, **arguments: Any) -> Call:
        """Give a command without waiting for its end."""
        self._calls += 1
        command = {"call": self._calls, "verb": verb, "arguments": arguments}
        self._commands.sendall(json.dumps(command).encode() + b"\n")
        return Call(self, self._calls, verb)

    def wait_for_answer(self, number: int, what: str, timeout_s: float) -> dict[str, Any]:
        until_s = time.monotonic() + timeout_s
        while number not in self._answers:
            self._commands.settimeout(max(until_s - time.monotonic(), 1e-3))
            try:
                line = self._answers_in.readline()
            except TimeoutError:
                raise TimeoutError(f"{self.engine_id}: {what}: no answer within {timeout_s} s") from None
            if not line:
                raise ConnectionError(f"{self.engine_id}: {what}: it is gone, exit code {self.wait_for_exit()}")
            answer = json.loads(line)
            self._answers[answer["call"]] = answer
        return self._answers.pop(number)

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Look at the engine's statistics until they are as wanted."""
        until_s = time.monotonic() + TIMEOUT_S
        while not condition(statistics := self.call("statistics")):
            assert time.monotonic() < until_s, f"{self.engine_id}: {statistics}"
        return statistics

    def stall(self, *, hold_gil: bool = False, after_reads: int = 0) -> Call:
        """Start to block the engine's loop once it has posted `after_reads` more reads; see `stalled`."""
        return self.start("stall", hold_gil=hold_gil, after_reads=after_reads)

    def wait_until_stalled(self) -> None:
        assert self._brake.poll(TIMEOUT_S), f"{self.engine_id} never got as far as to stall"
        assert self._brake.recv_bytes() == b"stalled"

    def go_on(self) -> None:
        """Let go of the brake."""
        self._brake.send_bytes(b"go on")

    def stop(self) -> None:
        """Stop it as SIGSTOP does; every thread of it stands still when this returns."""
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
        """Kill it if it still runs, and give back what it took of this process."""
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
        """Tell it to close its runtime and to end."""
        self.start("quit")

    def wait_for_exit(self) -> int | None:
        """Its exit code, or None if it does not end."""
        self._process.join(TIMEOUT_S)
        return self._process.exitcode

    def _signal(self, number: signal.Signals) -> None:
        if self.running and self._process.pid is not None:
            os.kill(self._process.pid, number)


class Engines:
    """Starts engines that share an environment; on a clean exit those that still run must end in order."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._started: list[EngineProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                running = [engine for engine in self._started if engine.running]
                for engine in running:
                    engine.resume()
                    engine.start_to_quit()
                codes = [(engine.engine_id, engine.wait_for_exit()) for engine in running]
                assert codes == [(engine.engine_id, 0) for engine in running]
        finally:
            for engine in self._started:
                engine.close()

    def start(self, *setups: EngineSetup) -> list[EngineProcess]:
        """Start several at once and wait for all of them."""
        new = [EngineProcess(setup, self._environment) for setup in setups]
        self._started += new
        return [engine.ready() for engine in new]

    def pair(self, **setup: Any) -> list[EngineProcess]:
        """A producer whose cache is full of 1 and a consumer whose cache is full of -1."""
        return self.start(
            EngineSetup(engine_id="producer", fill=1.0, **setup), EngineSetup(engine_id="consumer", fill=-1.0, **setup)
        )


@cache
def _context() -> ForkServerContext:
    """Makes processes out of one that has imported everything; what UCX logs is set where it is loaded."""
    os.environ.update(UCX_LOG_LEVEL="error", NIXL_LOG_LEVEL="ERROR")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "uvloop", "psutil", "kvflow", "kvflow.runtime.runtime", "nixl._bindings"])
    return context
