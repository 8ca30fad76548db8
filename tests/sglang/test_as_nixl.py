"""`KVFLOW_AS_NIXL=1`: servers with a launcher that knows only the backend "nixl". Their tokens equal one server's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

from tests.sglang.conftest import ALONE, DECODE, PREFILL
from tests.sglang.servers import Router, Server, prompt_of

SWITCHED = {"backend": "nixl", "environment": (("KVFLOW_AS_NIXL", "1"),)}


@pytest.fixture(scope="module")
def servers(site: Any) -> Iterator[tuple[Router, Server]]:
    prefill, decode, alone = site.have(replace(PREFILL, **SWITCHED), replace(DECODE, **SWITCHED), ALONE)
    router = Router(prefill, decode)
    yield router, alone
    router.close()


@pytest.mark.parametrize("length", [1, 16, 129, 1500])
def test_tokens_are_those_of_one_server(servers: tuple[Router, Server], length: int) -> None:
    router, alone = servers
    prompt = prompt_of(length, seed=3)
    assert router.generate(prompt) == alone.generate(prompt)


def test_one_line_of_each_says_so(servers: tuple[Router, Server]) -> None:
    router, _ = servers
    for server in (router.prefill, router.decode):
        assert server.said().count("KVFLOW_AS_NIXL=1: the transfer backend nixl is kvflow in this server") == 1
        assert "NIXL KVManager initialized" not in server.said(), "SGLang's own"
