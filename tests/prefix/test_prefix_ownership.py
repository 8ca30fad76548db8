"""The verbs of a `Prefixes` belong to the loop of its runtime, and a `Prefixes` to one runtime."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvflow import Part, Runtime, RuntimeState
from kvflow.errors import ConfigError, UsageError
from kvflow.prefix import Prefixes, PrefixRequest
from kvflow.prefix.testing import FakePrefixCache
from tests.runtime.test_ownership import PLAIN, STATES, assert_only_on_its_loop
from tests.support.tests_support import small_cache

REQUEST = PrefixRequest("prefix", keys=[bytes(32)], key_tokens=4, block_ids=[2], peers=[])
VERBS: dict[str, Any] = {
    "share": FakePrefixCache(4),
    "seek": REQUEST,
    "pull": REQUEST,
    "connect": (),
    "hand_on": {"successor": "tcp://127.0.0.1:1", "prefixes": [], "key_tokens": 4, "bytes_max": 1, "within_s": 1.0},
    "accept": {"take": print, "predecessors": []},
}
ANYWHERE = {"learn"}


def test_no_verb_is_forgotten() -> None:
    of_its_runtime = {name for name in vars(Part) if not name.startswith("_")}
    found = {name for name, _ in inspect.getmembers(Prefixes, inspect.isfunction) if not name.startswith("_")}
    assert found - of_its_runtime == {*VERBS} | ANYWHERE


@pytest.mark.parametrize("state", STATES)
async def test_every_verb_refuses_another_loop_and_takes_nothing(state: RuntimeState) -> None:
    await assert_only_on_its_loop(Prefixes(), state, VERBS, "share")


async def test_it_is_used_by_one_runtime_at_a_time_and_only_with_a_cache() -> None:
    prefixes = Prefixes()
    with pytest.raises(UsageError, match=r"^pull: <kvflow.prefix.Prefixes>: no runtime has registered a KV cache"):
        await prefixes.pull(REQUEST)
    assert prefixes.statistics is None
    async with Runtime(PLAIN, parts=[prefixes]) as first, Runtime(PLAIN, parts=[prefixes]) as second:
        await first.register_kv_caches(*small_cache())
        with pytest.raises(ConfigError, match="it is a part of another runtime"):
            await second.register_kv_caches(*small_cache())
        assert (await prefixes.pull(REQUEST)).num_tokens == 0
    async with Runtime(PLAIN, parts=[prefixes]) as third:
        await third.register_kv_caches(*small_cache())
        assert third.statistics().parts == {"prefix": prefixes.statistics}
