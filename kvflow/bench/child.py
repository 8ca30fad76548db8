"""Child processes of a bench: the parent's side, the child's side, and the one request and reply between them.

A process holds one object, its rank, whose coroutine methods are the steps that it can be asked for:
`child.run(Producer.offer, loads)` has the method of that name called there and returns what it returns. The end of the
pipe means: close everything and exit.

Children are spawned, never forked: a forked NIXL agent hangs. They die with their parent, even while they are stopped.
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
"""Variables for a child; None removes one."""
QUIET: Environment = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}
P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class BenchError(RuntimeError):
    """Failure, death or silence of a child, which the message names."""

    @property
    def reason(self) -> str:
        """The last line of a child's traceback."""
        return str(self).strip().splitlines()[-1]


class RankProcess(NamedTuple):
    """A rank to be started: `setup` is called in its process, on uvloop, and holds the rank as long as that lives."""

    name: str
    setup: Callable[[], contextlib.AbstractAsyncContextManager[object]]


class Child:
    """Process and the pipe to it: the name and arguments of a step go down, success and result come up."""

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
        """Exit code of the process, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait_ready(self) -> None:
        """Wait until the rank is set up."""
        self._receive("setup")

    def run(
        self, step: Callable[Concatenate[Any, P], Coroutine[Any, Any, ResultT]], *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        """Have the rank do a step; BenchError with its traceback if that fails."""
        return self.start(step, *args, **kwargs)()

    def start(
        self, step: Callable[Concatenate[Any, P], Coroutine[Any, Any, ResultT]], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], ResultT]:
        """Have the rank begin with a step; what is returned waits for its end, as `run` does. One at a time."""
        try:
            self._pipe.send((step.__name__, args, kwargs))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise BenchError(f"{self.rank.name}: died before {step.__name__}") from error
        return lambda: cast(ResultT, self._receive(step.__name__))

    def _receive(self, what: str) -> object:
        name = self.rank.name
        if not self._pipe.poll(_REPLY_TIMEOUT_S):
            raise BenchError(f"{name}: no end of {what} within {_REPLY_TIMEOUT_S:.0f} s")
        try:
            succeeded, value = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(_EXIT_TIMEOUT_S)
            raise BenchError(f"{name}: died in {what}, exit code {self._process.exitcode}") from error
        if not succeeded:
            raise BenchError(f"{name}: {value}")
        return value

    def close(self) -> None:
        """Let the process end and wait for it; kill it if it does not."""
        self._pipe.close()
        self._process.join(_EXIT_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def open_children(ranks: Sequence[RankProcess], environment: Environment) -> Iterator[Mapping[str, Child]]:
    """Start all ranks at once; at the end of the block their processes are gone.

    Readers leave before their producers, which are given before them: a producer must make progress when its reader
    leaves, otherwise it may die of it (tcp).
    """
    children: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            children[rank.name] = stack.enter_context(contextlib.closing(Child(rank, environment)))
        for child in children.values():
            child.wait_ready()
        yield children


class ChildCaller:
    """Rank that calls functions of modules, also those that wait."""

    async def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result


@contextlib.asynccontextmanager
async def open_caller() -> AsyncIterator[ChildCaller]:
    yield ChildCaller()


def call_in_child(name: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a process of its own; BenchError if it raises, or ends the process."""
    with open_children([RankProcess(name, open_caller)], QUIET) as children:
        return children[name].run(ChildCaller.call, function, *arguments)


def _child_main(pipe: Connection, parent_pid: int, rank: RankProcess, environment: Environment) -> None:
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes its children in order
    for name in environment:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in environment.items() if value is not None})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(pipe, rank))
    except Exception:  # noqa: BLE001  (the border of the process: everything becomes the parent's BenchError)
        with contextlib.suppress(BrokenPipeError):  # the parent has closed the pipe: it wants to know nothing more
            pipe.send((False, traceback.format_exc()))


async def _serve(pipe: Connection, rank: RankProcess) -> None:
    async with rank.setup() as steps:
        result: object = None
        while True:
            pipe.send((True, result))
            try:
                step, arguments, named = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            result = await getattr(steps, step)(*arguments, **named)


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)
