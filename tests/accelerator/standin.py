"""The stand-in accelerator: built once for all workers, registered as torch's device "standin", and steered by tests.

`backend.cpp` says what makes it a device. A finished library is renamed into place, so a build that was killed leaves
nothing that could be mistaken for one; its lock ends with its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

KIND, COUNT = "standin", 2
SOURCE = Path(__file__).with_name("backend.cpp")
FOLDER = Path(__file__).parents[2] / "build" / "accelerator"
BUILD_S = 300.0  # on two cores that do other things, too; alone it takes 10


class NotBuilt(Exception):
    """There is no stand-in here; the message says why."""


class Refused(enum.IntFlag):
    """Abilities that the device lacks, as real ones lack some."""

    NOTHING = 0
    COMPLEX = 1
    """Kernels for complex numbers."""
    INT64 = 2
    """Kernels for 64-bit integers, also as indices."""
    INDEXING = 4
    """Kernels that gather or scatter."""
    PINNED = 8
    """Pinned host memory."""


class StandIn:
    """The functions that torch expects in the module of a device type, and functions to hold all these devices."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.standin_reach.restype = ctypes.c_void_p
        self.library.standin_reach.argtypes = [ctypes.c_void_p]
        self.library.standin_open.restype = ctypes.c_void_p
        for function in ("export", "close"):
            getattr(self.library, f"standin_{function}").restype = ctypes.c_bool
        for function in ("queued", "waiting", "mapped", "wrong_pieces"):
            getattr(self.library, f"standin_{function}").restype = ctypes.c_int64

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def manual_seed_all(self, seed: int) -> None:
        """Nothing: its kernels are the CPU's, which draw numbers there."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def hold(self) -> None:
        """Start no further copy or kernel, on any stream. Work that a blocking call of torch waits for goes on."""
        self.library.standin_hold(ctypes.c_bool(True))

    def let_go(self) -> None:
        """Start the held work."""
        self.library.standin_hold(ctypes.c_bool(False))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def queued(self) -> int:
        """Return how many copies, kernels and events are queued or under way."""
        return int(self.library.standin_queued())

    def waiting(self) -> int:
        """Return how many threads of the host wait for a stream, an event or a device."""
        return int(self.library.standin_waiting())

    def mapped(self) -> int:
        """Return how many allocations of other processes are mapped here."""
        return int(self.library.standin_mapped())

    def wrong_pieces(self) -> int:
        """Return how many pieces of batches of copies were no memory of this process when they were to be copied."""
        return int(self.library.standin_wrong_pieces())

    def fail_copies(self, count: int = 1) -> None:
        """Have the next `count` copies fail when they run."""
        self.library.standin_fail_copies(ctypes.c_int64(count))

    def refuse(self, what: Refused) -> None:
        """Have the device lack some abilities, and no others."""
        self.library.standin_refuse(ctypes.c_int64(what))

    def reset(self) -> None:
        """Undo what a test has set, and wait until nothing is queued; failures of the test's own are gone then."""
        self.refuse(Refused.NOTHING)
        self.fail_copies(0)
        self.let_go()
        for number in range(COUNT):
            with contextlib.suppress(RuntimeError):
                torch.accelerator.synchronize(f"{KIND}:{number}")

    def reach(self, address: int) -> int:
        """Return where the host finds the bytes of a device's address, as a network card would; others as they are."""
        return int(self.library.standin_reach(address))


@functools.cache
def load() -> StandIn:
    """Build the stand-in unless it is built, and register it with torch. Raises NotBuilt."""
    path = built()
    rename_privateuse1_backend(KIND)
    standin = StandIn(path)
    torch._register_device_module(KIND, standin)  # type: ignore[no-untyped-call]
    return standin


def built(folder: Path = FOLDER, *, wait_s: float = BUILD_S) -> Path:
    """Return the library, built for this torch if that has not been done. Raises NotBuilt.

    Args:
        folder: where it is kept.
        wait_s: longest time to wait for another build, or for the own one.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    torch_home = Path(torch.__file__).parent
    include, libraries = torch_home / "include", torch_home / "lib"
    command = [
        "-O1",
        "-std=c++20",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    command += [f"-isystem{include}", f"-isystem{include}/torch/csrc/api/include"]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-pthread"]
    key = hashlib.sha256("\0".join([torch.__version__, *command, SOURCE.read_text("utf-8")]).encode()).hexdigest()[:16]
    target = folder / f"standin-{key}.so"
    if target.exists():
        return target
    if compiler is None:
        raise NotBuilt("there is no C++ compiler (g++, or what CXX names)")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock", wait_s):
        if not target.exists():
            _build([compiler, str(SOURCE), *command], target, wait_s)
    return target


def _build(command: list[str], target: Path, wait_s: float) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    try:
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, timeout=wait_s)
        if done.returncode:
            raise NotBuilt(f"the compiler failed: {done.stderr[-2000:]}")
        unfinished.replace(target)
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"the build took more than {wait_s} s") from error
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends. Raises NotBuilt if another one keeps it too long."""
    with path.open("w") as file:
        until_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise NotBuilt(f"another build has not ended within {wait_s} s ({path})") from None
                time.sleep(0.1)
        yield
