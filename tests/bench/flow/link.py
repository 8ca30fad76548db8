"""Which way the bytes of the flow bench go: this machine's memory, its tcp, or a cable between two networks.

With a cable each rank lives in a network of its own, which its process has made for itself: it is gone with the
process, and the cable with it, however either ends. Nothing has a name on the machine, so nothing is left behind.
"""

from __future__ import annotations

import ctypes
import enum
import os
import shutil
import subprocess
import time
from collections.abc import Mapping

from kvflow.bench.loads import Fabric, SettingsError

CABLE = "cable"
PRODUCER_HOST, READER_HOST = "10.231.8.1", "10.231.8.2"
_RATE = "1gbit"
_SHAPED = ("tbf", "rate", _RATE, "burst", "256kb", "latency", "20ms")
_TOOLS = ("ip", "tc", "unshare", "mount")
_TRIAL_S = 30.0
_UP_S = 10.0
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18


class Link(enum.StrEnum):
    SHM = "shm"
    TCP = "tcp"
    GBIT = "1gbit"

    @property
    def environment(self) -> Mapping[str, str | None]:
        """What a child's environment has to say for its bytes to go this way, whatever the caller has set."""
        if self is Link.GBIT:
            return {**Fabric.TCP.environment, "UCX_NET_DEVICES": CABLE}
        return Fabric(self.value).environment

    def hosts(self) -> tuple[str, str]:
        """Where the producer listens, and where the reader does."""
        return (PRODUCER_HOST, READER_HOST) if self is Link.GBIT else ("127.0.0.1", "127.0.0.1")


def require_cables() -> None:
    """SettingsError if this machine lets us make no network, no cable or no qdisc."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise SettingsError(f"--link {Link.GBIT}: needs {', '.join(_TOOLS)}; this machine has no {', '.join(missing)}")
    steps = ("mount --make-rprivate /", "mount -t sysfs sysfs /sys", f"ip link add {CABLE} type veth peer name other")
    script = " && ".join((*steps, f"tc qdisc add dev {CABLE} root {' '.join(_SHAPED)}"))
    command = ["unshare", "--net", "--mount", "sh", "-c", script]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TRIAL_S)
    except subprocess.TimeoutExpired as error:
        raise SettingsError(f"--link {Link.GBIT}: no cable within {_TRIAL_S:.0f} s") from error
    if tried.returncode:
        said = " ".join(tried.stderr.split()) or f"exit code {tried.returncode}"
        raise SettingsError(f"--link {Link.GBIT}: needs root, network namespaces, veth and tbf: {said}")


def lay_cable(one: int, other: int) -> None:
    """Connect the networks of two processes."""
    _run("ip", "link", "add", CABLE, "netns", str(one), "type", "veth", "peer", "name", CABLE, "netns", str(other))


def enter_own_network() -> None:
    """Move to a network that only this process has; with a /sys of its own, where UCX looks for network devices.

    For this thread and those that it starts.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        or libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"no network of its own for this process: {os.strerror(code)}")


def plug_in(host: str) -> None:
    """This process's end of the cable: its address, its rate. Returns when the other end is plugged in, too."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", f"{host}/24", "dev", CABLE)
    _run("tc", "qdisc", "add", "dev", CABLE, "root", *_SHAPED)
    _run("ip", "link", "set", CABLE, "up")
    deadline_s = time.monotonic() + _UP_S
    while "state UP" not in _run("ip", "link", "show", CABLE):  # else UCX would not see the device
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{CABLE} is not up after {_UP_S:.0f} s: is its other end plugged in?")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
