"""NIXL's own objects: its bindings, its errors, and an agent. The only module that imports nixl.

The wheel of NIXL brings a libibverbs and a libnl of its own. On a host with RDMA its InfiniBand module also loads the
system's libibverbs, which then binds to both copies of libnl, and the process ends by signal 11 in a destructor of
libnl-route (nixl 1.5.1, Debian 12). If the system's library is loaded before UCX starts, it binds to the system's
libnl alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import mmap
from types import ModuleType
from typing import Any

from kvflow.config import Config
from kvflow.core.cache.regions import Span
from kvflow.errors import ConfigError
from kvflow.transport.base import PeerGone, TransportError
from kvflow.transport.nixl.defaults import backend_params

_PROGRESS_DELAY_US = 100_000
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14
VERBS = "libibverbs.so.1"


class Agent:
    """A NIXL agent with its backends, and the memory that is registered with it."""

    def __init__(self, bindings: ModuleType, name: str, given: Config, *, progress: bool) -> None:
        self.native = new_agent(bindings, name, progress=progress)
        plugins = self.native.getAvailPlugins()
        unknown = next((name for name in given.nixl_backends if name not in plugins), None)
        if unknown is not None:
            raise ConfigError(f"nixl_backend: {unknown!r} is not among NIXL's plugins {sorted(plugins)}")
        self.backends = [
            self.native.createBackend(name, backend_params(name, params))
            for name, params in given.nixl_backends.items()
        ]
        self.registered: list[Any] = []

    def register(self, descriptors: Any) -> None:
        self.native.registerMem(descriptors, self.backends)
        self.registered.append(descriptors)

    def deregister(self) -> None:
        for descriptors in self.registered:
            self.native.deregisterMem(descriptors, self.backends)
        self.registered.clear()


def new_agent(bindings: ModuleType, name: str, *, progress: bool = False) -> Any:
    """A NIXL agent of one thread's, without backends. With `progress` it has a thread of its own that serves peers."""
    config = bindings.nixlAgentConfig()
    config.useProgThread = progress
    config.pthrDelay = _PROGRESS_DELAY_US if progress else 0
    config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
    return bindings.nixlAgent(name, config)


def start_agent(backend: str) -> tuple[tuple[str, ...], bool]:
    """Start an agent, with `backend` if NIXL has that plugin.

    Returns:
        The names of NIXL's plugins, and whether the system's libibverbs was loaded.

    Raises:
        ConfigError: NIXL is not there or does not load.
        Exception: the backend does not start; NIXL's own error.
    """
    bindings = import_bindings()
    agent = new_agent(bindings, "kvflow-plugins", progress=True)
    plugins = tuple(sorted(agent.getAvailPlugins()))
    if backend in plugins:
        agent.createBackend(backend, backend_params(backend, {}))
    return plugins, load_verbs()


@functools.cache
def load_verbs() -> bool:
    """Load the system's libibverbs, where it is installed, and return whether it is. Without effect once UCX runs."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(VERBS)  # RTLD_LOCAL: in the global scope, as by LD_PRELOAD, it would be what ends the process
        return True
    return False


def import_bindings() -> ModuleType:
    """NIXL's Python bindings. ConfigError if they are not there or do not load."""
    load_verbs()
    try:
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(
            "transport 'nixl' needs the nixl package, which is not installed or does not load: "
            f"pip install nixl ({error})"
        ) from error


def error_types(bindings: ModuleType) -> tuple[type[Exception], ...]:
    """NIXL's own exception classes; nothing else is translated."""
    found = (getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error"))
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))


_GONE = (
    "the connection to the peer's process is broken: it has ended or was killed, or the network between has failed;"
    " what NIXL and UCX print on stderr at this time is about the same"
)


def translated(error: Exception, bindings: ModuleType) -> TransportError:
    """Translate an error of NIXL's."""
    reported = f"{type(error).__name__}: {error}"
    if isinstance(error, bindings.nixlRemoteDisconnectError):
        found: TransportError = PeerGone(f"{_GONE} (NIXL: {reported})")
    else:
        found = TransportError(f"NIXL reports an error: {reported}")
    found.__cause__ = error
    return found


def prefault(span: Span) -> None:
    """Give every page of a span its memory now; contents do not change. Kernels that cannot are left alone."""
    start = span.address - span.address % mmap.PAGESIZE
    length = span.address + span.size_bytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
