"""What a producer says about device memory that peers on its machine can map: `SharedMemory`, and which process it is.

Readers get it with the metadata of the producer's agent. It is decoded strictly, and nothing in it is believed: a
handle is opened by the driver, the opened allocation has to be as large as it is said to be, and ranges outside of it
are refused. A process is on this machine if it has this machine's boot id and process namespace, and it is the one that
wrote this if it began when that one began. Its end is noticed by a file descriptor of the process: memory of a process
that has ended stays mapped, and holds old bytes.
"""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvflow.checks import printable
from kvflow.core.bounds import Name, Size
from kvflow.core.cache.regions import Span, UInt64Array
from kvflow.core.protocol.messages import AGENT_METADATA_BYTES_MAX, REGIONS_MAX
from kvflow.transport.base import TransportError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_FIELD = 19  # of /proc/PID/stat behind the name, which may hold spaces: when the process began
_HANDLE_BYTES_MAX = 512
_TEXT_CHARS_MAX = 80


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process, told apart from all processes of this and of other machines."""

    machine: Name
    """The machine's boot id, which all of its containers share."""
    namespace: Name
    """The process's namespace of process ids."""
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    started: Size
    """When the process began, in ticks since the boot of the machine."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation of a producer's device: its address and size there, and the handle that opens it elsewhere."""

    address: Size
    size_bytes: Size
    handle: Annotated[bytes, Meta(max_length=_HANDLE_BYTES_MAX)]


class RegisteredRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range of addresses that the producer has registered for peers to read."""

    address: Size
    size_bytes: Size


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory of a process, for readers on the same machine."""

    process: ProcessIdentity
    kind: Name
    """Kind of the device, such as "cuda"."""
    allocations: Annotated[tuple[Allocation, ...], Meta(max_length=REGIONS_MAX)]
    ranges: Annotated[tuple[RegisteredRange, ...], Meta(max_length=REGIONS_MAX)]
    host_metadata: Annotated[bytes, Meta(max_length=AGENT_METADATA_BYTES_MAX)]
    """NIXL's metadata of the agent without its device memory.

    A reader that has mapped the device memory gives this to NIXL. With the whole metadata, UCX would map the memory as
    well, and keep it until the reader's process ends.
    """


encode = msgspec.msgpack.Encoder().encode
_DECODER = msgspec.msgpack.Decoder(SharedMemory)


class NotMappable(TransportError):
    """Device memory of a peer cannot be mapped. The peer is then read by NIXL."""


class OnOtherMachine(NotMappable):
    """The peer runs on another machine, where nothing can be mapped."""


def decode(device_memory: bytes) -> SharedMemory:
    """Return what a peer says about its device memory. NotMappable if that does not decode."""
    try:
        return _DECODER.decode(device_memory)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotMappable("what the peer says about its device memory does not decode") from error


def own_process() -> ProcessIdentity:
    """Return the identity of this process. NotMappable where the system does not tell it."""
    try:
        return ProcessIdentity(machine=_machine(), namespace=_namespace(), pid=os.getpid(), started=_started("self"))
    except (OSError, ValueError, IndexError) as error:
        raise NotMappable(f"the system does not tell which process this is: {error}") from error


def _machine() -> str:
    return _BOOT_ID.read_text("ascii").strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _started(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[_START_FIELD])


class WatchedProcess:
    """A process of this machine, by a file descriptor that tells when the process has ended."""

    def __init__(self, process: ProcessIdentity) -> None:
        """Raises OnOtherMachine, or NotMappable if the process cannot be watched."""
        own = own_process()
        if process.machine != own.machine:
            raise OnOtherMachine("it runs on another machine")
        if process.namespace != own.namespace:
            theirs = printable(process.namespace, _TEXT_CHARS_MAX)
            raise NotMappable(f"it is in another container: process namespace {theirs}, ours {own.namespace}")
        try:
            self._file = os.pidfd_open(process.pid)
        except OSError as error:
            raise NotMappable(f"process {process.pid} cannot be watched: {error}") from error
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)
        try:
            started = _started(process.pid)
        except (OSError, ValueError, IndexError):
            started = 0
        if started != process.started:
            self.close()
            raise NotMappable(f"process {process.pid} has ended")

    @property
    def has_ended(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        os.close(self._file)


class AddressMap:
    """Ranges of addresses, and where their bytes lie in this process."""

    def __init__(self, ranges: list[tuple[Span, int]]) -> None:
        """`ranges`: (range, address of its first byte in this process) of each. They do not overlap."""
        ranges = sorted(ranges, key=lambda entry: entry[0].address)
        self._starts = np.array([span.address for span, _ in ranges], dtype=np.uint64)
        self._ends = np.array([span.address + span.size_bytes for span, _ in ranges], dtype=np.uint64)
        self._places = np.array([place for _, place in ranges], dtype=np.uint64)

    def find(self, addresses: UInt64Array, sizes: UInt64Array) -> UInt64Array | None:
        """Return where `sizes[i]` bytes at `addresses[i]` lie here, for all i; None if one is not within one range."""
        if not len(self._starts):
            return None
        index = np.searchsorted(self._starts, addresses, side="right")
        known = index > 0
        index = np.where(known, index - 1, 0)
        offsets = addresses - self._starts[index]
        if not (known & (addresses <= self._ends[index]) & (sizes <= self._ends[index] - addresses)).all():
            return None
        return np.asarray(self._places[index] + offsets)

    def find_one(self, span: Span) -> int | None:
        """Return where `span` lies here; None if it is not within one range."""
        found = self.find(np.array([span.address], dtype=np.uint64), np.array([span.size_bytes], dtype=np.uint64))
        return None if found is None else int(found[0])
