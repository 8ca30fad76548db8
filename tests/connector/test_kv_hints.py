"""KV hints of routers: the peers that are asked for a prefix, and hints that are ignored, counted and logged once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.connector.kv_hints import IgnoredHint, KVHints
from tests.support.tests_support import each

AT = "tcp://10.0.0.7:5600"
FETCH: dict[str, Any] = {
    **{"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0"},
    "payload": {"source_control_endpoint": AT, "block_hashes": [1, 2], "mode": "copy"},
}
OTHER = {**FETCH, "action_type": "kv.share", "payload": {}}


def hints(*actions: object, version: object = "0.1") -> dict[str, object]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def fetch(**payload: object) -> dict[str, object]:
    return {**FETCH, "payload": {**FETCH["payload"], **payload}}


def as_objects(given: dict[str, Any]) -> object:
    """As vLLM passes them on."""
    actions = [SimpleNamespace(**action) for action in given["actions"]]
    return SimpleNamespace(**{**given, "actions": actions})


def read(given: object, *, pulls: bool = True) -> tuple[str | None, list[IgnoredHint]]:
    ignored: list[IgnoredHint] = []
    return KVHints(pulls=pulls, on_ignored=ignored.append).source(given), ignored


@each(
    ("given", "source"),
    [
        (hints(FETCH), AT),
        (as_objects(hints(FETCH)), AT),
        (hints(fetch(source_control_endpoint="tcp://[fd00::2]:1")), "tcp://[fd00::2]:1"),
        (hints({**FETCH, "payload": {"source_control_endpoint": AT}, "later": 1}), AT),
        (hints(FETCH, fetch(source_control_endpoint="tcp://b:1")), AT),
        (hints(), None),
    ],
)
def test_who_holds_the_prefix(given: object, source: str | None) -> None:
    assert read(given) == (source, [])


@each(
    ("given", "reason"),
    [
        (hints(FETCH, version="0.2"), "version"),
        ({"protocol_version": "9", "shape": "of its own"}, "version"),
        (hints(OTHER), "action"),
        (hints({**FETCH, "action_version": "2.0", "payload": "of its own"}), "action"),
        (hints(fetch(mode="move")), "action"),
        (hints(fetch(source_control_endpoint="10.0.0.7:5600")), "malformed"),
        (hints(fetch(source_control_endpoint="tcp://0.0.0.0:5600")), "malformed"),
        (hints(fetch(source_control_endpoint="tcp://10.0.0.7:0")), "malformed"),
        (hints(fetch(source_control_endpoint="tcp://10.0.0.7:70000")), "malformed"),
        (hints(fetch(source_control_endpoint=7)), "malformed"),
        (hints({**FETCH, "payload": {}}), "malformed"),
        (hints({**FETCH, "payload": None}), "malformed"),
        (hints("kv.fetch"), "malformed"),
        (hints(*[OTHER] * 65), "malformed"),
        (hints(FETCH, version=0.1), "malformed"),
        ({}, "malformed"),
        ([], "malformed"),
        ("kv.fetch", "malformed"),
        (7, "malformed"),
    ],
)
def test_what_is_ignored_is_counted(given: object, reason: str) -> None:
    assert read(given) == (None, [IgnoredHint(reason)])


def test_one_action_that_is_ignored_keeps_no_other_from_being_read() -> None:
    assert read(hints(OTHER, fetch(source_control_endpoint=""), FETCH)) == (AT, ["action", "malformed"])


def test_an_engine_that_pulls_nothing_says_so() -> None:
    assert read(hints(FETCH), pulls=False) == (None, ["not_pulled"])


def test_each_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ignored: list[IgnoredHint] = []
    made = KVHints(pulls=True, on_ignored=ignored.append)
    for _ in range(3):
        for given in (hints(OTHER), hints(version="7"), hints(fetch(source_control_endpoint="a\nb"))):
            assert made.source(given) is None
    assert len(ignored) == 9
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert all("ignored a KV hint" in line and "\n" not in line for line in lines)
    assert "action kv.share 1.0" in lines[0]
    assert "protocol_version: ours 0.1, theirs 7" in lines[1]
