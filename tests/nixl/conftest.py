"""Engines in processes of their own, on real NIXL over shared memory and over tcp."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine import EngineSetup
from tests.support.engine_process import TRANSPORTS, EngineProcess, Engines


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engines(transport: str) -> Iterator[Engines]:
    with Engines(TRANSPORTS[transport]) as engines:
        yield engines


@pytest.fixture(scope="module")
def spare(transport: str) -> Iterator[EngineProcess]:
    """An engine that no test of the module harms. Its blocks hold 7 at first."""
    with Engines(TRANSPORTS[transport]) as engines:
        (spare,) = engines.start(EngineSetup(engine_id="spare", fill=7.0, config={"cancel_grace_s": 0.1}))
        yield spare
