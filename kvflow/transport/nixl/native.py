"""NIXL's Python bindings, errors and agents. The only module that imports nixl.

NIXL's wheel contains its own libibverbs and libnl. On a host with RDMA its InfiniBand module also loads the system's
libibverbs. If the system's libibverbs is loaded before UCX starts, it binds only to the system's libnl. Otherwise it
binds to both copies, and libnl-route has ended processes at their exit (nixl 1.5.1, Debian 12).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib
import logging
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kvflow.config import Config
from kvflow.core.cache.regions import Span
from kvflow.errors import ConfigError
from kvflow.transport.base import PeerGone, TransportError
from kvflow.transport.device.cache_device import is_rocm
from kvflow.transport.nixl.defaults import backend_params

_MAPS = Path("/proc/self/maps")
_PROGRESS_DELAY_US = 100_000
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14
VERBS = "libibverbs.so.1"
_TCP_LISTEN = "0A"
_LOST_LISTENERS: set[int] = set()
"""File descriptors of tcp listeners that UCX has closed in this process."""


class Agent:
    """A NIXL agent with its backends, its registered memory, and the tcp listeners that UCX opened for it."""

    def __init__(self, bindings: ModuleType, name: str, kvflow_config: Config, *, progress: bool) -> None:
        for file in _LOST_LISTENERS:
            _occupy_descriptor(file)
        others = listening_sockets()
        self.native = new_agent(bindings, name, progress=progress)
        plugins = self.native.getAvailPlugins()
        unknown = next((name for name in kvflow_config.nixl_backends if name not in plugins), None)
        if unknown is not None:
            raise ConfigError(
                f"nixl_backend: {unknown!r} is not among NIXL's plugins {sorted(plugins)}{plugin_dir_note()}"
            )
        self.backends = [
            self.native.createBackend(name, backend_params(name, params))
            for name, params in kvflow_config.nixl_backends.items()
        ]
        self.registered: list[Any] = []
        address = bytes(self.native.getLocalMD())
        self._listeners = {
            file: socket
            for file, socket in listening_sockets().items()
            if others.get(file) != socket and socket.port.to_bytes(2, "big") in address
        }
        """Sockets on which UCX accepts tcp connections for this agent, by file descriptor.

        UCX 1.23 closes a listener for good if it cannot accept a connection.
        """

    @property
    def listener_count(self) -> int:
        """Number of tcp listeners that UCX opened for the agent."""
        return len(self._listeners)

    def lost_listeners(self) -> list[int]:
        """Return the ports of this agent's listeners that UCX has closed."""
        lost = {file: socket.port for file, socket in self._listeners.items() if _inode(file) != socket.inode}
        _LOST_LISTENERS.update(lost)
        return list(lost.values())

    def register(self, descriptors: Any) -> None:
        self.native.registerMem(descriptors, self.backends)
        self.registered.append(descriptors)

    def deregister(self) -> None:
        for descriptors in self.registered:
            self.native.deregisterMem(descriptors, self.backends)
        self.registered.clear()


class ListeningSocket(NamedTuple):
    """A listening tcp socket of this process: its inode in the form "socket:[123]", and its port."""

    inode: str
    port: int


def listening_sockets() -> dict[int, ListeningSocket]:
    """Return the listening tcp sockets of this process, by file descriptor; {} if /proc cannot be read."""
    ports = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _TCP_LISTEN:
                    ports[f"socket:[{inode}]"] = int(local.rpartition(":")[2], 16)
    listening = {}
    with contextlib.suppress(OSError):
        for file in map(int, os.listdir("/proc/self/fd")):
            inode = _inode(file)
            if inode in ports:
                listening[file] = ListeningSocket(inode, ports[inode])
    return listening


def _occupy_descriptor(file: int) -> None:
    """Occupy the file descriptor number `file` until the process ends, so that no new UCX listener gets that number.

    UCX has closed a listener with this number but still has a handler for it, so another listener with this number
    would fail. No effect if the number is in use.
    """
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            kept = nothing if nothing == file else fcntl.fcntl(nothing, fcntl.F_DUPFD_CLOEXEC, file)
        finally:
            if nothing != file:
                os.close(nothing)
        if kept not in (file, nothing):
            os.close(kept)


def _inode(file: int) -> str:
    """Return the target of the link /proc/self/fd/`file`, which names a socket by its inode; "" if `file` is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:
        return ""


def new_agent(bindings: ModuleType, name: str, *, progress: bool = False) -> Any:
    """Return a NIXL agent without backends, for use by one thread only. `progress`: run NIXL's progress thread."""
    config = bindings.nixlAgentConfig()
    config.useProgThread = progress
    config.pthrDelay = _PROGRESS_DELAY_US if progress else 0
    config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
    return bindings.nixlAgent(name, config)


def start_agent(backend: str) -> tuple[tuple[str, ...], bool, str]:
    """Create an agent as a trial. If NIXL has the plugin `backend`, also create that backend.

    Returns:
        The names of NIXL's plugins, whether the system's libibverbs was loaded, and the result of `plugin_dir_note`.

    Raises:
        ConfigError: NIXL is not installed or does not load.
        Exception: NIXL's own error if the backend does not start.
    """
    bindings = import_bindings()
    agent = new_agent(bindings, "kvflow-plugins", progress=True)
    plugins = tuple(sorted(agent.getAvailPlugins()))
    if backend in plugins:
        agent.createBackend(backend, backend_params(backend, {}))
    return plugins, load_verbs(), plugin_dir_note()


@functools.cache
def load_verbs() -> bool:
    """Load the system's libibverbs before NIXL's copy, and return whether it is installed.

    The call has no use once UCX has started.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(VERBS)  # RTLD_LOCAL: NIXL's own copies must not bind to its symbols
        return True
    return False


def import_bindings() -> ModuleType:
    """Import and return NIXL's Python bindings. Raises ConfigError if they are not installed or do not load."""
    load_verbs()
    reports_errors = logging.raiseExceptions
    try:
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(
            "transport 'nixl' needs the nixl package, which is not installed or does not load: "
            f"pip install nixl ({error})"
        ) from error
    finally:  # importing nixl 1.5.1 sets it to False, and all loggers of the process lose their errors without a word
        logging.raiseExceptions = reports_errors


def error_types(bindings: ModuleType) -> tuple[type[Exception], ...]:
    """Return NIXL's exception classes, which `translate_error` translates."""
    errors = (getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error"))
    return tuple(kind for kind in errors if isinstance(kind, type) and issubclass(kind, Exception))


_PEER_GONE = (
    "the connection to the peer's process is broken: the process has ended or was killed, or the network has failed;"
    " NIXL and UCX report the same on stderr"
)


def translate_error(error: Exception, bindings: ModuleType) -> TransportError:
    """Return the TransportError for `error`, an exception of NIXL: a PeerGone if the peer has disconnected."""
    reported = f"{type(error).__name__}: {error}"
    if isinstance(error, bindings.nixlRemoteDisconnectError):
        translated: TransportError = PeerGone(f"{_PEER_GONE} (NIXL: {reported})")
    else:
        translated = TransportError(f"NIXL reports an error: {reported}")
    translated.__cause__ = error
    return translated


def prefault(span: Span) -> None:
    """Fault in every page of `span` now, without changing the content. No effect before Linux 5.14."""
    start = span.address - span.address % mmap.PAGESIZE
    length = span.address + span.size_bytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)


def readable_kinds() -> Mapping[str, bool]:
    """Return {kind of device: whether the loaded UCX can read its memory}, for "xpu" and, on ROCm, also for "cuda".

    Call this after an agent has been created, because that loads UCX.
    """
    kinds = {"xpu": has_module("ze")}
    return {**kinds, "cuda": has_module("rocm")} if is_rocm() else kinds


def has_module(name: str) -> bool:
    """Return whether the UCX that this process has loaded comes with the module `name`, for example "ze"."""
    folders = {folder for used in _folders_of("/libuct") for folder in (used, used / "ucx")}
    return any(next(folder.glob(f"libuct_{name}*.so*"), None) is not None for folder in folders)


def plugin_dir_note() -> str:
    """Return a note for messages if NIXL_PLUGIN_DIR is set, but not to the loaded NIXL's own plugins; else ""."""
    chosen = os.environ.get("NIXL_PLUGIN_DIR", "")
    own = [str(folder / "plugins") for folder in _folders_of("/libnixl.so")]
    if not chosen or os.path.realpath(chosen) in map(os.path.realpath, own):
        return ""
    return f"; NIXL_PLUGIN_DIR is set to {chosen!r}" + "".join(
        f", this NIXL's own plugins are in {folder!r}" for folder in own
    )


def _folders_of(library: str) -> set[Path]:
    """Return the folders of the libraries that this process has loaded and whose paths contain `library`."""
    lines = _MAPS.read_text("utf-8", "replace").splitlines()
    return {Path(line.split(maxsplit=5)[5]).parent for line in lines if library in line}
