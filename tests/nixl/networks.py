"""A network that a test can break: a cable between two network namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Cable:
    """Two network namespaces with a cable between them."""

    producer_side: str
    consumer_side: str
    producer_host: str = "10.231.7.1"
    consumer_host: str = "10.231.7.2"

    def unplug(self) -> None:
        _ip("-n", self.producer_side, "link", "set", "cable", "down")

    def plug_in(self) -> None:
        _ip("-n", self.producer_side, "link", "set", "cable", "up")


@contextlib.contextmanager
def cable() -> Iterator[Cable]:
    """Skips the test where the machine does not let us make network namespaces."""
    made = Cable(*(f"kvflow-{side}-{os.getpid()}" for side in ("p", "c")))
    try:
        try:
            _lay(made)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs network namespaces: {error} {getattr(error, 'stderr', '')}")
        yield made
    finally:
        for side in (made.producer_side, made.consumer_side):
            subprocess.run(["ip", "netns", "delete", side], capture_output=True, check=False)


def _lay(made: Cable) -> None:
    for side in (made.producer_side, made.consumer_side):
        _ip("netns", "add", side)
        _ip("-n", side, "link", "set", "lo", "up")
    peer = ("peer", "name", "cable", "netns", made.consumer_side)
    _ip("link", "add", "cable", "netns", made.producer_side, "type", "veth", *peer)
    for side, host in ((made.producer_side, made.producer_host), (made.consumer_side, made.consumer_host)):
        _ip("-n", side, "address", "add", f"{host}/24", "dev", "cable")
        _ip("-n", side, "link", "set", "cable", "up")
    for side in (made.producer_side, made.consumer_side):
        while "state UP" not in _ip("-n", side, "link", "show", "cable"):  # else UCX would not see the device
            pass


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
