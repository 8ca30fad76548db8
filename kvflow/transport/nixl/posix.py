"""NIXL's POSIX backend as a mover of bytes between memory and files.

Its agent is a third one of the runtime, since a file is no peer: NIXL reaches it under the agent's own name. Several
moves share one queue of the kernel, and an error of one may be reported for another while bytes of both are on their
way (seen in NIXL's source, 1.5). So a move that fails is taken for lost: its handle is kept, since NIXL writes to it
when the rest ends, and its blocks are quarantined until the agent is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvflow.config import STORE_BACKEND as POSIX
from kvflow.core.cache.regions import Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import ConfigError
from kvflow.transport.base import TransportError
from kvflow.transport.files import Direction, MoveLost
from kvflow.transport.nixl.agents import error_types, import_bindings


class PosixMover:
    """See `transport.files.Mover`."""

    def __init__(self, name: str, params: Mapping[str, str]) -> None:
        """Raises ConfigError if the backend does not start with these parameters."""
        self._bindings = import_bindings()
        self._errors = error_types(self._bindings)
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = config.useListenThread = False
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_NONE
        self._name = name
        try:
            self._agent: Any = self._bindings.nixlAgent(name, config)
            self._backends = [self._agent.createBackend(POSIX, dict(params))]
        except self._errors as error:
            raise ConfigError(f"NIXL cannot start backend {POSIX!r} as configured: {error}") from error
        self._memory: list[Any] = []
        self._files: dict[int, Any] = {}
        self._kept: list[object] = []
        self._lost: list[object] = []

    def register(self, spans: Sequence[Span], keepalive: object) -> None:
        rows = [(span.address, span.size_bytes, 0, "") for span in spans]
        descriptors = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, rows)
        try:
            self._agent.registerMem(descriptors, self._backends)
        except self._errors as error:
            raise TransportError(f"NIXL's {POSIX} backend cannot register {len(spans)} spans: {error}") from error
        self._memory.append(descriptors)
        self._kept.append(keepalive)

    def opened(self, fd: int, size_bytes: int) -> None:
        descriptors = self._bindings.nixlRegDList(self._bindings.FILE_SEG, [(0, size_bytes, fd, "")])
        try:
            self._agent.registerMem(descriptors, self._backends)
        except self._errors as error:
            raise TransportError(f"NIXL cannot register a file of {size_bytes} bytes: {error}") from error
        self._files[fd] = descriptors

    def closing(self, fd: int) -> None:
        descriptors = self._files.pop(fd, None)
        if descriptors is not None:
            self._agent.deregisterMem(descriptors, self._backends)

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        api = self._bindings
        operation = api.NIXL_WRITE if direction is Direction.SAVE else api.NIXL_READ
        ours, theirs = descriptors.table
        try:
            local, remote = api.nixlXferDList(api.DRAM_SEG, ours), api.nixlXferDList(api.FILE_SEG, theirs)
            handle = self._agent.createXferReq(operation, local, remote, self._name, "", self._backends)
        except self._errors as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error
        try:
            self._agent.postXferReq(handle, "")
        except self._errors as error:
            raise self._loss(handle, error) from error
        return handle

    def ended(self, begun: object) -> bool:
        try:
            if self._agent.getXferStatus(begun) != self._bindings.NIXL_SUCCESS:
                return False
        except self._errors as error:
            raise self._loss(begun, error) from error
        self._agent.releaseXferReq(begun)
        return True

    def close(self) -> None:
        for descriptors in (*self._memory, *self._files.values()):
            self._agent.deregisterMem(descriptors, self._backends)
        del self._agent
        self._kept.clear()

    def _loss(self, handle: object, error: Exception) -> MoveLost:
        self._lost.append(handle)
        return MoveLost(f"{type(error).__name__}: {error}")
