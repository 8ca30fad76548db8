"""Children of the benches are forked, except where they are the subject."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def children(forked_children: None) -> None: ...
