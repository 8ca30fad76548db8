"""`kvflow doctor --pair`: two running engines, and the rules that keep them from handing over."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import torch
from tests_support import WAIT_S

import kvflow
from kvflow import CacheLayout, Config, Runtime
from kvflow.doctor.engine_pair import examine_pair
from kvflow.doctor.findings import Status
from kvflow.doctor.peer_channel import REACH_FIX

CONFIG = Config(engine_id="doctor", handshake_timeout_s=WAIT_S)


@contextlib.asynccontextmanager
async def engine(engine_id: str, *, heads: int = 2, layers: int = 2, **config: Any) -> AsyncIterator[str]:
    """A running engine, by the name that the doctor is given."""
    base = Config(engine_id=engine_id, listen="tcp://127.0.0.1:0", transport="inproc", drain_timeout_s=1.0)
    caches = {f"layer.{at}": torch.zeros(2, 8, heads, 4, 8) for at in range(layers)}
    async with Runtime(replace(base, **config)) as runtime:
        await runtime.register_kv_caches(caches, CacheLayout.infer(caches, order="HND", block_size=4))
        yield f"{engine_id}@{runtime.address}"


async def findings(prefill: str, decode: str) -> list[tuple[str, Status, str]]:
    return [(one.name, one.status, one.found) for one in await examine_pair(CONFIG, prefill, decode)]


async def test_two_that_go_together() -> None:
    async with engine("prefill") as prefill, engine("decode") as decode:
        found = await findings(prefill, decode)
        assert [status for _, status, _ in found] == [Status.OK] * 3
        assert found[-1][2].startswith("the handshake allows it")


async def test_each_rule_that_says_no_is_a_finding_with_both_values() -> None:
    async with (
        engine("prefill", heads=4, layers=3, model="llama") as prefill,
        engine("decode", model="qwen") as decode,
    ):
        found = [text for name, status, text in await findings(prefill, decode) if status is Status.FAIL]
        assert "model: ours 'qwen', theirs 'llama'" in found
        assert any(one.startswith("layers: ours 2 (0, 1), theirs 3 (0, 1, 2)") for one in found)
        assert "num_kv_heads: ours 2 on each of 1 rank, theirs 4 on each of 1 rank" in found


async def test_the_doctor_and_the_load_agree() -> None:
    """The doctor reports the error of the load."""
    caches = {f"layer.{at}": torch.zeros(2, 8, 2, 4, 16) for at in range(2)}
    base = Config(engine_id="decode", listen="tcp://127.0.0.1:0", transport="inproc", drain_timeout_s=1.0)
    async with engine("prefill") as prefill, Runtime(base) as decode:
        await decode.register_kv_caches(caches, CacheLayout.infer(caches, order="HND", block_size=4))
        (made,) = await decode.prewarm([kvflow.PeerAddress(engine_id="prefill", address=prefill.split("@")[1])])
        told = [text for _, _, text in await findings(prefill, f"decode@{decode.address}")]
        assert made is not None
        assert any(text in str(made) for text in told), (str(made), told)


async def test_who_does_not_answer_or_is_somebody_else_is_said() -> None:
    async with engine("prefill") as prefill:
        found = await findings(prefill, "decode@tcp://127.0.0.1:1")
        assert [status for _, status, _ in found] == [Status.OK, Status.FAIL]
        found = await findings("other@" + prefill.split("@")[1], prefill)
        assert found[0][1:] == (
            Status.FAIL,
            f"other@{prefill.split('@')[1]}: unknown engine: expected 'other', this is 'prefill'",
        )


async def fixes(prefill: str) -> list[str]:
    """Return the advice for the prefill engine."""
    async with engine("decode") as decode:
        return [one.fix for one in await examine_pair(CONFIG, prefill, decode) if one.status is Status.FAIL]


async def test_of_an_engine_that_is_down_it_says_where_to_look_and_not_to_give_what_was_given() -> None:
    async with engine("prefill") as prefill:
        pass
    assert await fixes(prefill) == [REACH_FIX]


async def test_what_is_not_as_it_has_to_be_is_what_to_give() -> None:
    for given in ("tcp://127.0.0.1:5600", "prefill@", "@tcp://127.0.0.1:5600", "prefill@127.0.0.1:5600", "prefill"):
        assert await fixes(given) == ["give ENGINE_ID@tcp://host:port as tickets name them"]


async def test_an_engine_that_has_no_cache_yet_is_to_be_waited_for() -> None:
    config = Config(engine_id="prefill", listen="tcp://127.0.0.1:0", transport="inproc")
    async with Runtime(config) as runtime:
        (fix,) = await fixes(f"prefill@{runtime.address}")
    assert "cache" in fix
