"""Copies bytes between memory and files by NIXL's POSIX backend.

`PosixMover` has its own NIXL agent, the third agent of the runtime. Its transfers (moves) name this agent also as the
remote agent, since a file belongs to no peer.

All moves share one queue of the kernel. With POSIX AIO the error of one move is reported for all moves, while bytes of
each move may still be on the way (seen in NIXL's source, 1.5), and after some errors no queue takes further moves. So a
failed move counts as lost (it may still run), and its handle is kept, since NIXL writes to the handle when the other
moves end. Once no other move is under way, the agent is ended. With Linux AIO the end of the agent waits for the queue
(`io_destroy`); with POSIX AIO `aio_cancel` says whether an operation still runs. With io_uring the end of the agent may
not wait, so lost moves are known to have stopped only when the I/O thread has ended.
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
from kvflow.storage.store_thread import Direction, LostMoves, MoveLost
from kvflow.transport.base import TransportError
from kvflow.transport.nixl.native import error_types, import_bindings, new_agent, plugin_dir_note

_AIO_NOTCANCELED = 1  # from <aio.h>


def _cancel_posix_aio(fd: int) -> bool:
    """Cancel the POSIX AIO operations on file `fd` that have not begun. Return True if one that had begun runs on."""
    return bool(ctypes.CDLL(None).aio_cancel(fd, None) == _AIO_NOTCANCELED)


class PosixMover:
    """Implementation of `storage.store_thread.Mover` that copies bytes by NIXL's POSIX backend.

    A copy (a move) that has failed but may still run is lost. To stop lost moves, `stop_lost_moves` ends the NIXL
    agent; the next `register_file` or `begin` creates another agent.
    """

    def __init__(self, name: str, params: Mapping[str, str], spans: Sequence[Span]) -> None:
        """Create the NIXL agent `name` with the backend parameters `params`, and register the memory `spans`.

        Raise ConfigError if either fails.
        """
        self._bindings = import_bindings()
        self._errors = error_types(self._bindings)
        self._name = name
        self._params = dict(params)
        self._spans = spans
        self._sizes: dict[int, int] = {}
        """Size in bytes of each registered file, by file descriptor."""
        self._lost_handles: list[object] = []
        """NIXL handles of moves for which NIXL reported an error, but which may still copy bytes."""
        self._agent: Any = None
        self._backends: list[Any] = []
        self._memory: list[Any] = []
        self._files: dict[int, Any] = {}
        try:
            self._start()
        except self._errors as error:
            what = f"backend {POSIX!r} as configured, with {counted(len(spans), 'span')} of memory"
            raise ConfigError(f"NIXL cannot start {what}: {error}{plugin_dir_note()}") from error

    def register_file(self, fd: int, size_bytes: int) -> None:
        try:
            self._start()
            self._add_file(fd, size_bytes)
        except self._errors as error:
            raise TransportError(f"NIXL cannot register a file of {counted(size_bytes, 'byte')}: {error}") from error
        self._sizes[fd] = size_bytes

    def deregister_file(self, fd: int) -> None:
        if self._sizes.pop(fd, None) is not None and self._agent is not None:
            self._agent.deregisterMem(self._files.pop(fd), self._backends)

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        bindings = self._bindings
        operation = bindings.NIXL_WRITE if direction is Direction.SAVE else bindings.NIXL_READ
        memory_rows, file_rows = descriptors.table
        try:
            self._start()
            memory = bindings.nixlXferDList(bindings.DRAM_SEG, memory_rows)
            file = bindings.nixlXferDList(bindings.FILE_SEG, file_rows)
            handle = self._agent.createXferReq(operation, memory, file, self._name, "", self._backends)
        except self._errors as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error
        try:
            self._agent.postXferReq(handle, "")
        except self._errors as error:
            raise self._keep_lost(handle, error) from error
        return handle

    def has_ended(self, handle: object) -> bool:
        try:
            if self._agent.getXferStatus(handle) != self._bindings.NIXL_SUCCESS:
                return False
        except self._errors as error:
            raise self._keep_lost(handle, error) from error
        self._agent.releaseXferReq(handle)
        return True

    def stop_lost_moves(self) -> LostMoves:
        if "use_uring" in self._params:
            return LostMoves.NEVER
        if any(map(_cancel_posix_aio, self._files)):
            return LostMoves.NOT_YET
        self.close()
        return LostMoves.STOPPED

    def close(self) -> None:
        for handle in self._lost_handles:
            with contextlib.suppress(*self._errors):
                self._agent.releaseXferReq(handle)
        for descriptors in (*self._memory, *self._files.values()):
            with contextlib.suppress(*self._errors):
                self._agent.deregisterMem(descriptors, self._backends)
        self._lost_handles, self._memory, self._files, self._backends, self._agent = [], [], {}, [], None

    def _start(self) -> None:
        """If there is no NIXL agent, create one, and register the memory and the open files.

        Errors of NIXL are raised unchanged.
        """
        if self._agent is not None:
            return
        self._agent = new_agent(self._bindings, self._name)
        try:
            self._backends = [self._agent.createBackend(POSIX, self._params)]
            rows = [(span.address, span.size_bytes, 0, "") for span in self._spans]
            self._memory.append(self._bindings.nixlRegDList(self._bindings.DRAM_SEG, rows))
            self._agent.registerMem(self._memory[0], self._backends)
            for fd, size_bytes in self._sizes.items():
                self._add_file(fd, size_bytes)
        except BaseException:
            self.close()
            raise

    def _add_file(self, fd: int, size_bytes: int) -> None:
        """Register the open file `fd` with the NIXL agent. Errors of NIXL are raised unchanged."""
        self._files[fd] = self._bindings.nixlRegDList(self._bindings.FILE_SEG, [(0, size_bytes, fd, "")])
        self._agent.registerMem(self._files[fd], self._backends)

    def _keep_lost(self, handle: object, error: Exception) -> MoveLost:
        """Keep the handle of a failed move, which may still run. Return a MoveLost to raise."""
        self._lost_handles.append(handle)
        return MoveLost(f"{type(error).__name__}: {error}")
