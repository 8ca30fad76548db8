"""Children of the benches are forked from a process that has imported torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvflow.bench import child
from tests.support.engine_process import forked_processes


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[None]:
    with forked_processes(child):
        yield
