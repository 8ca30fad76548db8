"""The two processes of a contender, as the parent sees them.

Children are spawned, never forked: a forked NIXL agent hangs. They die with their parent, even while they are stopped.
A pair whose agents spin (contender a) is stopped by SIGSTOP whenever it is not its turn, so that it takes no core from
the others; nothing is in flight then.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import TypeVar

from kvflow.cli.bench.messages import Failed, Message, Quit

_REPLY_TIMEOUT_S = 300.0
_EXIT_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1

Body = Callable[[Connection], None]
ReplyT = TypeVar("ReplyT", bound=Message)


class BenchError(RuntimeError):
    """A child failed, died or kept silent; the message names it."""


class Child:
    """One process of the bench and the pipe to it."""

    def __init__(self, name: str, body: Body, environment: Mapping[str, str | None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child_main, args=(theirs, os.getpid(), body), name=name, daemon=True)
        with _patched_environment(environment):
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "started in __init__"
        return pid

    def receive(self, expected: type[ReplyT]) -> ReplyT:
        """Wait for a message of the expected kind; BenchError with the child's traceback if it failed instead."""
        if not self._pipe.poll(_REPLY_TIMEOUT_S):
            raise BenchError(f"{self.name}: no {expected.__name__} within {_REPLY_TIMEOUT_S:.0f} s")
        try:
            reply: Message = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(_EXIT_TIMEOUT_S)
            raise BenchError(f"{self.name}: died, exit code {self._process.exitcode}") from error
        if isinstance(reply, Failed):
            raise BenchError(f"{self.name}: {reply.traceback}")
        if not isinstance(reply, expected):
            raise BenchError(f"{self.name}: expected {expected.__name__}, got {type(reply).__name__}")
        return reply

    def ask(self, message: Message, expected: type[ReplyT]) -> ReplyT:
        try:
            self._pipe.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise BenchError(f"{self.name}: died before {type(message).__name__}") from error
        return self.receive(expected)

    def signal(self, number: signal.Signals) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def close(self) -> None:
        """Ask the process to quit and wait for it; kill it if it does not."""
        self.signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send(Quit())
        self._process.join(_EXIT_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


class Pair:
    """Producer and reader of one contender."""

    def __init__(self, producer: Child, reader: Child, *, spins: bool) -> None:
        self.producer = producer
        self.reader = reader
        self._spins = spins

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """The pair may run inside the block; a pair that spins is stopped outside of it."""
        self.wake()
        try:
            yield
        finally:
            if self._spins:
                self.producer.signal(signal.SIGSTOP)
                self.reader.signal(signal.SIGSTOP)

    def wake(self) -> None:
        if self._spins:
            self.producer.signal(signal.SIGCONT)
            self.reader.signal(signal.SIGCONT)


def _child_main(pipe: Connection, parent_pid: int, body: Body) -> None:
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes its children in order
    try:
        body(pipe)
    except EOFError:
        return
    except Exception:  # noqa: BLE001  (the border of the process: everything becomes the parent's BenchError)
        pipe.send(Failed(traceback=traceback.format_exc()))


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


@contextlib.contextmanager
def _patched_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: remove) for the children that are started inside the block."""
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
