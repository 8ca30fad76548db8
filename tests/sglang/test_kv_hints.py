"""KV hints of SGLang's requests: nothing is pulled into its cache, which one line says, and a counter counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

import sglang.srt.disaggregation.utils  # noqa: F401 - first: its modules import each other
from prometheus_client import REGISTRY
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from kvflow.sglang import hooks
from kvflow.sglang.manager import KVFlowManager

PAYLOAD = {"source_control_endpoint": "tcp://10.0.0.7:5600", "block_hashes": [1, 2]}
ACTION = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": PAYLOAD}
HINTS = decode_kv_hints_envelope({"protocol_version": "0.1", "message_id": "m", "actions": [ACTION]})


def test_hints_are_ignored_with_one_line_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    queue, made = SimpleNamespace(kv_manager=None), SimpleNamespace(kv_receiver=None)
    for hints in (None, HINTS, HINTS):
        request: Any = SimpleNamespace(kv_hints=hints, disagg_kv_sender=None, bootstrap_room=None)
        hooks._after_prefill_add(KVFlowManager, None, queue, request)
        hooks._after_create_receiver(made, queue, request)
    assert REGISTRY.get_sample_value("sglang:kvflow_hints_ignored_total", {"reason": "not_pulled"}) == 4
    lines = [one.getMessage() for one in caplog.records if "KV hint" in one.getMessage()]
    assert lines == ["ignored a KV hint; no further line for this reason (not_pulled): this engine pulls no prefixes"]
