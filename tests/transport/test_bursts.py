"""Which reads keep the agents' thread off the loop's core: many small ones that wait (docs/decisions/0031)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests_support import PATIENT

from kvflow.transport.base import AgentName
from kvflow.transport.nixl.loop import NixlTransport

MIB = 1 << 20


@pytest.mark.parametrize(("size_bytes", "beside"), [(MIB, True), (8 * MIB, False)], ids=["small", "large"])
def test_the_thread_works_beside_the_loop_while_many_small_reads_wait(size_bytes: int, beside: bool) -> None:
    said: list[bool] = []
    thread: Any = SimpleNamespace(alive=True, submit=lambda _: None, work_beside_loop=said.append)
    agents: Any = SimpleNamespace(taken=0)
    transport = NixlTransport(PATIENT, "burst")
    transport._thread, transport._agents = thread, agents

    def post() -> None:
        transport.post_read(AgentName("peer"), SimpleNamespace(size_bytes=size_bytes))  # type: ignore[arg-type]

    post()
    assert said == [False], "it is alone"
    for _ in range(16):
        post()
    assert said[-1] is beside
    agents.taken = transport._given
    post()
    assert said[-1] is False, "nothing waits any more"
