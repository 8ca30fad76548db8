"""Child processes of a bench: the parent's side, the child's side, and the parent's calls over a pipe.

A child holds one object, its rank. The parent runs coroutine methods of the rank: `child.run(Producer.offer, loads)`
calls `rank.offer(loads)` in the child and returns its result. When the parent closes the pipe, the child closes the
rank and exits.

Children are spawned, never forked: NIXL agents do not survive a fork. When the parent ends, the kernel kills the
children, even if they are stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import multiprocessing
import os
import signal
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import uvloop

_REPLY_TIMEOUT_S = 300.0
_EXIT_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1

Environment: TypeAlias = Mapping[str, str | None]
"""Environment variables for a child process; the value None removes a variable."""
QUIET_ENVIRONMENT: Environment = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}
P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class BenchError(RuntimeError):
    """A child process failed, died, or did not answer in time. The message names the child."""

    @property
    def reason(self) -> str:
        """Last line of the message; if a method of the rank has raised, the last line of the child's traceback."""
        return str(self).strip().splitlines()[-1]


class RankProcess(NamedTuple):
    """Description of a child process: its name, and the function `open_rank`, which the child calls to open its rank.

    `open_rank()` returns an async context manager that yields the rank.
    """

    name: str
    open_rank: Callable[[], contextlib.AbstractAsyncContextManager[object]]


class Child:
    """A child process and the pipe to it.

    The parent sends the name and arguments of a method of the rank; the child sends back the method's result.
    """

    def __init__(self, rank: RankProcess, environment: Environment) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), rank, environment)
        self._process = context.Process(target=_child_main, args=arguments, name=rank.name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "started in __init__"
        return pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the child process, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait_ready(self) -> None:
        """Wait until the child has opened its rank. Raise BenchError if that fails."""
        self._receive("setup")

    def run(
        self, step: Callable[Concatenate[Any, P], Coroutine[Any, Any, ResultT]], *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        """Run `step`, a coroutine method of the rank, in the child process, and return its result.

        If the method fails, raise BenchError with the child's traceback.
        """
        return self.start(step, *args, **kwargs)()

    def start(
        self, step: Callable[Concatenate[Any, P], Coroutine[Any, Any, ResultT]], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], ResultT]:
        """Start `step`, a coroutine method of the rank, in the child process. A child runs one method at a time.

        Return a function that waits for the method's result, or raises BenchError if the method fails.
        """
        try:
            self._pipe.send((step.__name__, args, kwargs))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise BenchError(f"{self.rank.name}: died before {step.__name__}") from error
        return lambda: cast(ResultT, self._receive(step.__name__))

    def answers_within(self, seconds: float) -> bool:
        """Wait until the method that was started last has answered, or the child has died. False: not yet."""
        return self._pipe.poll(seconds)

    def _receive(self, what: str) -> object:
        name = self.rank.name
        if not self._pipe.poll(_REPLY_TIMEOUT_S):
            raise BenchError(f"{name}: {what} did not end within {_REPLY_TIMEOUT_S:.0f} s")
        try:
            succeeded, value = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(_EXIT_TIMEOUT_S)
            raise BenchError(f"{name}: died in {what}, exit code {self._process.exitcode}") from error
        if not succeeded:
            raise BenchError(f"{name}: {value}")
        return value

    def close(self) -> None:
        """Close the pipe, which makes the child exit, and wait until the child has ended.

        Kill the child if it does not exit in time.
        """
        self._pipe.close()
        self._process.join(_EXIT_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def open_children(ranks: Sequence[RankProcess], environment: Environment) -> Iterator[Mapping[str, Child]]:
    """Context manager: start a child process for each of `ranks`, all together, and yield the children by name.

    At the exit the children are closed in the reverse order of `ranks`, so list producers before their readers: a
    producer makes progress until its readers have left (docs/decisions/0002-two-agents.md).
    """
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            children[rank.name] = stack.enter_context(contextlib.closing(Child(rank, environment)))
        for child in children.values():
            child.wait_ready()
        yield children


class ChildCaller:
    """A rank with one method, `call`, which calls any function in the child process. The function may be async."""

    async def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result


@contextlib.asynccontextmanager
async def open_caller() -> AsyncIterator[ChildCaller]:
    yield ChildCaller()


def call_in_child(name: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call `function` in a new child process, and return its result.

    If the function raises or the child dies, raise BenchError.
    """
    with open_children([RankProcess(name, open_caller)], QUIET_ENVIRONMENT) as children:
        return children[name].run(ChildCaller.call, function, *arguments)


def _child_main(pipe: Connection, parent_pid: int, rank: RankProcess, environment: Environment) -> None:
    _die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes its children in order
    for name in environment:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in environment.items() if value is not None})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(pipe, rank))
    except Exception:  # noqa: BLE001  (the edge of the process: every error becomes the parent's BenchError)
        with contextlib.suppress(BrokenPipeError):  # the parent has closed the pipe, so it does not want the error
            pipe.send((False, traceback.format_exc()))


async def _serve(pipe: Connection, rank: RankProcess) -> None:
    async with rank.open_rank() as steps:
        result: object = None
        while True:
            pipe.send((True, result))
            try:
                step, arguments, named = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            result = await getattr(steps, step)(*arguments, **named)


def _die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent, the process `parent_pid`, ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)
