"""Servers are slow to start, so tests share them: a test names the set-ups it needs; only what differs is restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.vllm.servers import MODEL, ROOT, Server, Setup, python_path

os.environ["PYTHONPATH"] = python_path()  # tests use vLLM in this process and in those that it starts
sys.path[:0] = python_path().split(os.pathsep)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped when the tests are

TEXT = ROOT / "docs" / "architecture.md"

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
PREFILL = Setup(role="kv_producer", core=0, blocks=64, options=TOOLS)
DECODE = Setup(role="kv_consumer", core=1, blocks=64, options=TOOLS)


class Site:
    """A machine with at most one prefill and one decode server."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}

    def have(self, *setups: Setup) -> tuple[Server, ...]:
        """Return running servers of these set-ups. New servers start at the same time."""
        for setup in setups:
            known = self._servers.get(setup.role)
            if known is None or known.setup != setup or not known.alive:
                if known is not None and known.alive:
                    known.stop()
                self._servers[setup.role] = Server.start(setup)
        found = tuple(self._servers[setup.role] for setup in setups)
        for server in found:
            server.wait_up()
        return found

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for server in self._servers.values():
                if server.alive:
                    stack.callback(server.stop)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    assert (MODEL / "config.json").exists(), "the model is missing: run these tests with `python3 dev.py vllm`"
    made = Site()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def pair(site: Site) -> tuple[Server, Server]:
    producer, consumer = site.have(PREFILL, DECODE)
    return producer, consumer


@pytest.fixture(scope="session")
def story(site: Site) -> list[int]:
    """More than 2,000 tokens of text."""
    tokens = site.have(PREFILL, DECODE)[1].tokens(TEXT.read_text())
    assert len(tokens) > 2000
    return tokens
