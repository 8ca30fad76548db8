"""Tests of kvflow in SGLang: `python3 dev.py sglang` makes their environment. Elsewhere they are not collected."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_SGLANG = importlib.util.find_spec("sglang") is not None

if HAS_SGLANG:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped when the tests are
    spec = importlib.util.spec_from_file_location("standins", HERE / "standins" / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")

    from tests.sglang.servers import Router, Server, Setup

    PREFILL = Setup(mode="prefill")
    DECODE = Setup(mode="decode", options=("--disaggregation-decode-enable-radix-cache",))
    ALONE = Setup(mode="null")

    class Site:
        """A machine with at most one server of each mode; they are slow to start, so tests share them."""

        def __init__(self) -> None:
            self._servers: dict[str, Server] = {}

        def have(self, *setups: Setup) -> tuple[Server, ...]:
            """Return running servers of these set-ups. New servers start at the same time."""
            for setup in setups:
                known = self._servers.get(setup.mode)
                if known is None or known.setup != setup or known.process.poll() is not None:
                    port = known.bootstrap_port if known is not None else 0
                    if known is not None:
                        known.stop()
                    self._servers[setup.mode] = Server.start(setup, port)
            found = tuple(self._servers[setup.mode] for setup in setups)
            for server in found:
                server.wait_up()
            return found

        def close(self) -> None:
            with contextlib.ExitStack() as stack:
                for server in self._servers.values():
                    stack.callback(server.stop)

    @pytest.fixture(scope="session")
    def site() -> Iterator[Site]:
        site = Site()
        try:
            yield site
        finally:
            site.close()

    @pytest.fixture
    def router(site: Site) -> Iterator[Router]:
        """A prefill and a decode server, and the router in front."""
        prefill, decode, _ = site.have(PREFILL, DECODE, ALONE)
        router = Router(prefill, decode)
        yield router
        router.close()

    @pytest.fixture
    def alone(site: Site) -> Server:
        """One server that does both. Its answers are the right ones."""
        return site.have(PREFILL, DECODE, ALONE)[2]
