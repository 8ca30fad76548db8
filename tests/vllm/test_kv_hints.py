"""KV hints as vLLM passes them to a side: the peers that a request asks for a prefix. No server is started."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvflow.vllm.scheduler_side import SchedulerSide
from tests.support.tests_support import any_ticket
from tests.vllm.test_engine_requests import REMOTE, request_of, side_of
from tests.vllm.test_settings import prefixes

PEER, HINTED, NAMED = "tcp://a:1", "tcp://10.0.0.7:5600", "tcp://10.0.0.8:5600"
SOURCE = {"remote_kv_source": {"kv_request_id": "r", "remote_host": "10.0.0.8", "remote_port": 5600}}
PROMPT = list(range(1000))


def envelope(address: str = HINTED, version: str = "1.0") -> KvHintsEnvelope:
    """As a launcher gives it to `generate()`."""
    payload = {"source_control_endpoint": address, "block_hashes": [1, 2]}
    action = KvHintAction(action_id="a", action_type="kv.fetch", action_version=version, payload=payload)
    return KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[action])


def in_params(address: str = HINTED) -> dict[str, Any]:
    """As Dynamo puts it into the parameters."""
    payload = {"source_control_endpoint": address, "block_hashes": [1, 2]}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {"kv_hint": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}


def asked(side: SchedulerSide, **given: Any) -> tuple[str, ...]:
    """Return the peers that a new request asks."""
    side.on_new_request(request_of("plain", prompt_token_ids=PROMPT, **given))
    assert side._prefixes is not None
    side._prefixes.questions.ask_or_wait("r", 0)
    return tuple(peer for question in side._prefixes.questions.take_questions() for peer in question.peers)


@pytest.mark.parametrize(
    ("given", "peers"),
    [
        ({}, (PEER,)),
        ({"kv_hints": envelope()}, (HINTED,)),
        ({"params": in_params()}, (HINTED,)),
        ({"kv_hints": envelope(), "params": in_params("tcp://elsewhere:1")}, (HINTED,)),
        ({"kv_hints": envelope(), "params": SOURCE}, (NAMED,)),
        ({"params": {**in_params(), **SOURCE}}, (NAMED,)),
        ({"kv_hints": envelope(version="2.0")}, (PEER,)),
        ({"params": {"kv_hint": "fetch it"}}, (PEER,)),
    ],
)
def test_whom_a_request_asks(given: dict[str, Any], peers: tuple[str, ...]) -> None:
    """If hints are ignored, the request asks the peers that the engine knows."""
    side = side_of(prefixes(prefix_peers=[PEER]))
    assert asked(side, **given) == peers
    ignored = {"2.0": ["action"], "fetch it": ["malformed"]}
    expected = next((reasons for word, reasons in ignored.items() if word in str(given)), [])
    assert side.stats.data["hints_ignored"] == expected
    assert side.stats.data["tickets_refused"] == []


def test_an_engine_that_pulls_nothing_counts_hints(caplog: pytest.LogCaptureFixture) -> None:
    for made in (None, prefixes(share_prefixes=True)):
        side = side_of(made)
        for nth in range(2):
            side.on_new_request(request_of("plain", f"r{nth}", kv_hints=envelope()))
        assert side.stats.data["hints_ignored"] == ["not_pulled"] * 2
    assert len([one for one in caplog.records if "ignored a KV hint" in one.getMessage()]) == 2


def test_a_ticket_is_loaded_and_its_hint_not_looked_at() -> None:
    side = side_of(None)
    ticket = any_ticket().without_leases(request_id=REMOTE, block_ids=[0, 1], num_tokens=6, ttl_s=9.0)
    side.on_new_request(request_of("plain", params=ticket.to_params(), kv_hints=envelope()))
    assert side.stats.data["hints_ignored"] == []
