"""Engines in processes of their own, on real NIXL over shared memory and over tcp."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import TRANSPORTS, Engines


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engines(transport: str) -> Iterator[Engines]:
    with Engines(TRANSPORTS[transport]) as engines:
        yield engines
