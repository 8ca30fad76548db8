"""Requests that warm a server's prefix cache from its peers, on real servers: what is loaded, and what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.vllm.warming import WarmOutcome, WarmRequests
from tests.vllm.conftest import Site
from tests.vllm.servers import Server
from tests.vllm.sharing import DECODE, PORT, PREFILL
from tests.vllm.test_models import prompt_of
from tests.vllm.test_prefix import BY_SOURCE, Counted, alone, family, settle, until

WARM = {"kvflow": {"warm": True}}
WARMS = "vllm:kvflow_warms_total"


def warm(server: Server, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """Warm a server. Return what it says that it has found."""
    answer = server.complete(prompt, 16, kv_transfer_params={**WARM, **more})
    assert answer["usage"]["completion_tokens"] == 1
    found: dict[str, Any] = answer["kv_transfer_params"]["kvflow"]["warm"]
    return found


def computed(server: Server) -> float:
    """Return the number of prompt tokens that a server has computed."""
    server.ids(prompt_of(3), 1, cache_salt="so that counters are shown")
    return server.metric(BY_SOURCE, source="local_compute")


def test_a_prefix_is_loaded_and_one_token_computed(site: Site) -> None:
    holder, reader = site.have(DECODE, PREFILL)
    first, second = family(1000)
    expected = alone(holder, second)
    holder.ids(first)
    counted, before = Counted(reader), computed(reader)
    assert warm(reader, second) == {"outcome": "loaded", "cached_tokens": 0, "loaded_tokens": 992}
    reader.wait_metric(WARMS, 1, outcome="loaded")
    assert computed(reader) - before == 1 + 3
    asked = counted.asked
    assert reader.ids(second) == expected
    assert computed(reader) - before == 1 + 3 + len(second) - 992 + 3
    assert counted.asked == asked, "what is here is not asked for"
    assert warm(reader, second) == {"outcome": "nothing", "cached_tokens": 992, "loaded_tokens": 0}
    settle(holder, reader)


def test_what_nobody_has_is_not_computed(site: Site) -> None:
    """Nor what the named holder does not have."""
    holder, reader = site.have(DECODE, PREFILL)
    before = computed(reader)
    prompt, _ = family(1500)
    assert warm(reader, prompt) == {"outcome": "nothing", "cached_tokens": 0, "loaded_tokens": 0}
    source = {"kv_request_id": "r", "remote_host": "127.0.0.1", "remote_port": PORT}
    assert warm(reader, prompt, remote_kv_source=source)["outcome"] == "nothing"
    assert computed(reader) - before == 2 + 3
    settle(holder, reader)


def test_a_server_that_pulls_nothing_refuses(site: Site) -> None:
    holder, reader = site.have(DECODE, PREFILL)
    before = computed(holder)
    prompt, _ = family(1500)
    found = warm(holder, prompt)
    assert (found["outcome"], found["reason"]) == ("refused", "this server pulls no prefixes: set prefix_peers")
    answer = reader.complete(prompt, 16, kv_transfer_params={"kvflow": {"warm": "yes"}})
    found = answer["kv_transfer_params"]["kvflow"]["warm"]
    assert found["outcome"] == "refused"
    assert "kvflow.warm" in found["reason"]
    assert computed(holder) - before == 1 + 3
    settle(holder, reader)


def test_warming_goes_on_beside_requests_that_need_the_same_prefix(site: Site) -> None:
    holder, reader = site.have(DECODE, PREFILL)
    first, *others = family(1000, members=5)
    expected = [alone(holder, prompt) for prompt in others]
    holder.ids(first)
    counted = Counted(reader)
    with ThreadPoolExecutor(8) as pool:
        warming = [pool.submit(warm, reader, prompt) for prompt in others]
        answers = [pool.submit(reader.ids, prompt) for prompt in others]
        assert [answer.result() for answer in answers] == expected
        assert {found.result()["outcome"] for found in warming} <= {"loaded", "nothing"}
    until(reader, counted, "external", 992)
    settle(holder, reader)


# --- without a server


def request_of(length: int, params: Any = WARM) -> Any:
    tokens = list(range(length))
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params=params,
        prompt_token_ids=tokens,
        _all_token_ids=[*tokens],
        num_prompt_tokens=length,
        num_computed_tokens=0,
        max_tokens=16,
    )


@pytest.fixture
def ended() -> list[WarmOutcome]:
    return []


@pytest.fixture
def requests(ended: list[WarmOutcome]) -> WarmRequests:
    return WarmRequests(32, pulls=True, on_end=ended.append)


def test_a_failed_load_computes_one_token(requests: WarmRequests, ended: list[WarmOutcome]) -> None:
    """Whether vLLM keeps some of the blocks or none, and looks in its cache again."""
    for kept in (0, 64):
        request = request_of(1000)
        requests.add(request)
        assert requests.match(request, 64, (928, True)) == (928, True)
        assert len(request._all_token_ids) == request.num_prompt_tokens == 993
        request.num_computed_tokens = kept
        requests.note_failed(["r", "another"])
        assert request.prompt_token_ids == list(range(kept + 1))
        assert requests.match(request, 0, (928, True)) == (0, False)
        told = requests.finish(request)
        assert told is not None
        assert told["kvflow"]["warm"]["outcome"] == "failed"
        assert told["kvflow"]["warm"]["loaded_tokens"] == 0
    assert ended == ["failed", "failed"]


def test_the_pool_is_asked_for_room(requests: WarmRequests) -> None:
    """Each time: blocks that were free may be gone when vLLM asks again, and the other way round."""
    free = SimpleNamespace(get_num_free_blocks=lambda: 31)
    requests.bind_pool(free)  # type: ignore[arg-type]
    request = request_of(1000)
    requests.add(request)
    assert requests.match(request, 0, (None, False)) == (None, False)
    assert requests.match(request, 0, (992, True)) == (0, False)
    assert request.num_prompt_tokens == 1
    assert requests.finish(request) == {
        "kvflow": {
            "warm": {
                "outcome": "no_room",
                "cached_tokens": 0,
                "loaded_tokens": 0,
                "reason": "no room: 32 blocks needed, 31 free",
            }
        }
    }


@pytest.mark.parametrize("params", [None, {}, {"kvflow": None}, {"kvflow": {"warm": False}}, {"kvflow": {"ranks": []}}])
def test_other_requests_are_left_alone(requests: WarmRequests, params: Any) -> None:
    request = request_of(100, params)
    requests.add(request)
    assert requests.match(request, 32, (64, True)) == (64, True)
    requests.note_failed(["r"])
    assert (request.num_prompt_tokens, request.max_tokens, requests.finish(request)) == (100, 16, None)
