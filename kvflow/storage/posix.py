"""NIXL's POSIX backend as a mover of bytes between memory and files.

Its agent is a third one of the runtime. A file is no peer: NIXL reaches it under the agent's own name. Moves share one
queue of the kernel. With POSIX AIO the error of one is reported for all of them, while bytes of any may be on their way
(seen in NIXL's source, 1.5); and after some errors a queue of any kind takes no more moves. So a failed move counts as
lost, and its handle is kept, since NIXL writes to it when the rest ends. Once nothing else is under way the agent is
ended: Linux AIO waits for its queue (`io_destroy`), POSIX AIO is asked. A ring of io_uring is not known to wait; with
it, lost moves have stopped only when the thread has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from kvflow.checks import counted
from kvflow.config import STORE_BACKEND as POSIX
from kvflow.core.cache.regions import Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import ConfigError
from kvflow.storage.files import Direction, MoveLost, Settled
from kvflow.transport.base import TransportError
from kvflow.transport.nixl.native import error_types, import_bindings, new_agent

_AIO_NOTCANCELED = 1  # of <aio.h>


class _FileAgent:
    """A NIXL agent for files, and the memory and files that it knows."""

    def __init__(self, bindings: Any, name: str, params: Mapping[str, str]) -> None:
        """Raises what NIXL raises."""
        self._bindings = bindings
        self.api = new_agent(bindings, name)
        self.backends = [self.api.createBackend(POSIX, dict(params))]
        self._memory: list[Any] = []
        self._files: dict[int, Any] = {}

    def add_memory(self, spans: Sequence[Span]) -> None:
        """Raises what NIXL raises."""
        rows = [(span.address, span.size_bytes, 0, "") for span in spans]
        self._memory.append(self._bindings.nixlRegDList(self._bindings.DRAM_SEG, rows))
        self.api.registerMem(self._memory[-1], self.backends)

    def add_file(self, fd: int, size_bytes: int) -> None:
        """Raises what NIXL raises."""
        self._files[fd] = self._bindings.nixlRegDList(self._bindings.FILE_SEG, [(0, size_bytes, fd, "")])
        self.api.registerMem(self._files[fd], self.backends)

    @property
    def stoppable(self) -> bool:
        """True if the agent can be ended: POSIX AIO has stopped, and it waits for all else."""
        return not any(map(_runs_posix_aio, self._files))

    def drop_file(self, fd: int) -> None:
        self.api.deregisterMem(self._files.pop(fd), self.backends)

    def end(self, lost: Sequence[object], errors: tuple[type[Exception], ...]) -> None:
        """End the agent; `lost` are handles of moves that are not known to have ended."""
        for handle in lost:
            with contextlib.suppress(*errors):
                self.api.releaseXferReq(handle)
        for descriptors in (*self._memory, *self._files.values()):
            with contextlib.suppress(*errors):
                self.api.deregisterMem(descriptors, self.backends)
        del self.api


def _runs_posix_aio(fd: int) -> bool:
    """Cancel what has not begun of what POSIX AIO is to do with a file. True if something has, and goes on."""
    return bool(ctypes.CDLL(None).aio_cancel(fd, None) == _AIO_NOTCANCELED)


class PosixMover:
    """See `storage.files.Mover`."""

    def __init__(self, name: str, params: Mapping[str, str]) -> None:
        """Raises ConfigError if the backend does not start with these parameters."""
        self._bindings = import_bindings()
        self._errors = error_types(self._bindings)
        self._name = name
        self._params = dict(params)
        self._spans: list[Sequence[Span]] = []
        self._sizes: dict[int, int] = {}
        """Sizes of the open files, by descriptor."""
        self._kept: list[object] = []
        self._lost: list[object] = []
        try:
            self._agent: _FileAgent | None = self._start()
        except self._errors as error:
            raise ConfigError(f"NIXL cannot start backend {POSIX!r} as configured: {error}") from error

    def register(self, spans: Sequence[Span], keepalive: object) -> None:
        try:
            self._running().add_memory(spans)
        except self._errors as error:
            what = counted(len(spans), "span")
            raise TransportError(f"NIXL's {POSIX} backend cannot register {what}: {error}") from error
        self._spans.append(spans)
        self._kept.append(keepalive)

    def opened(self, fd: int, size_bytes: int) -> None:
        try:
            self._running().add_file(fd, size_bytes)
        except self._errors as error:
            raise TransportError(f"NIXL cannot register a file of {counted(size_bytes, 'byte')}: {error}") from error
        self._sizes[fd] = size_bytes

    def closing(self, fd: int) -> None:
        if self._sizes.pop(fd, None) is not None and self._agent is not None:
            self._agent.drop_file(fd)

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        api = self._bindings
        operation = api.NIXL_WRITE if direction is Direction.SAVE else api.NIXL_READ
        ours, theirs = descriptors.table
        try:
            agent = self._running()
            local, remote = api.nixlXferDList(api.DRAM_SEG, ours), api.nixlXferDList(api.FILE_SEG, theirs)
            handle = agent.api.createXferReq(operation, local, remote, self._name, "", agent.backends)
        except self._errors as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error
        try:
            agent.api.postXferReq(handle, "")
        except self._errors as error:
            raise self._loss(handle, error) from error
        return handle

    def ended(self, begun: object) -> bool:
        agent = self._running()
        try:
            if agent.api.getXferStatus(begun) != self._bindings.NIXL_SUCCESS:
                return False
        except self._errors as error:
            raise self._loss(begun, error) from error
        agent.api.releaseXferReq(begun)
        return True

    def settle(self) -> Settled:
        if "use_uring" in self._params:
            return Settled.NEVER
        if self._agent is not None and not self._agent.stoppable:
            return Settled.NOT_YET
        self._end()
        return Settled.STOPPED

    def close(self) -> None:
        self._end()
        self._kept.clear()

    def _start(self) -> _FileAgent:
        """An agent that knows all memory and files. Raises what NIXL raises."""
        agent = _FileAgent(self._bindings, self._name, self._params)
        try:
            for spans in self._spans:
                agent.add_memory(spans)
            for fd, size_bytes in self._sizes.items():
                agent.add_file(fd, size_bytes)
        except BaseException:
            agent.end([], self._errors)
            raise
        return agent

    def _running(self) -> _FileAgent:
        """The running agent; a new one if the last was ended. Raises what NIXL raises if it cannot be made."""
        if self._agent is None:
            self._agent = self._start()
        return self._agent

    def _end(self) -> None:
        if self._agent is not None:
            self._agent.end(self._lost, self._errors)
        self._agent, self._lost = None, []

    def _loss(self, handle: object, error: Exception) -> MoveLost:
        self._lost.append(handle)
        return MoveLost(f"{type(error).__name__}: {error}")
