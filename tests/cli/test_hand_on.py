"""`kvflow hand-on`: what it asks of two vLLM servers, and when it stops."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from kvflow.cli.app import app
from kvflow.cli.hand_on import HandedOnPrompts, HandOnError, checked_url, hand_on, send_json
from tests.support.tests_support import each

OLD, NEW = "http://old:8000", "http://new:8000"
TOKEN_BYTES = 10
PROMPTS = [[number] * 100 for number in range(1, 5)]


class Servers:
    """An old and a new server."""

    def __init__(self, *outcomes: str) -> None:
        self.recent: Any = {
            "holder": "tcp://10.0.0.7:5600",
            "token_bytes": TOKEN_BYTES,
            "requests": [{"prompt": prompt} for prompt in PROMPTS],
        }
        self.introduction: Any = {"remote_engine_id": "new"}
        self.successor: Any = None
        self.outcomes = list(outcomes)
        self.warmed: list[Mapping[str, Any]] = []

    def send(self, url: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        assert timeout_s > 0
        if url.endswith("/v1/models"):
            return {"data": [{"id": "model"}]}
        assert body is not None
        assert body["max_tokens"] == 1
        asked = body["kv_transfer_params"]["kvflow"]
        if "introduce" in asked:
            assert url == f"{NEW}/v1/completions"
            return {"kv_transfer_params": {"kvflow": {"introduction": self.introduction}}}
        if "successor" in asked:
            assert url == f"{OLD}/v1/completions"
            self.successor = asked["successor"]
            return {"kv_transfer_params": {"kvflow": {"successor": {"engine_id": "new"}}}}
        if url == f"{OLD}/v1/completions":
            assert body["kv_transfer_params"]["kvflow"]["recent"] > 0
            return {"kv_transfer_params": {"kvflow": {"recent": self.recent}}}
        assert url == f"{NEW}/v1/completions"
        self.warmed.append(body)
        outcome = self.outcomes.pop(0) if self.outcomes else "loaded"
        loaded = len(body["prompt"]) - 1 if outcome == "loaded" else 0
        warm = {"outcome": outcome, "cached_tokens": 0, "loaded_tokens": loaded, "reason": f"it is {outcome}"}
        return {"kv_transfer_params": {"kvflow": {"warm": warm}}}

    def hand_on(self, *, bytes_max: int | None = None, within_s: float = 60.0) -> HandedOnPrompts:
        return hand_on(OLD, NEW, bytes_max=bytes_max, within_s=within_s, send=self.send)

    @property
    def prompts(self) -> list[int]:
        """The first token of each prompt that the new server was warmed with."""
        return [body["prompt"][0] for body in self.warmed]


def test_the_new_server_reads_each_prompt_from_the_old_one() -> None:
    servers = Servers()
    servers.recent["requests"][1] |= {"cache_salt": "tenant", "model": "adapter"}
    handed_on = servers.hand_on()
    assert servers.prompts == [1, 2, 3, 4]
    assert (handed_on.outcomes, handed_on.tokens, handed_on.size_bytes) == ({"loaded": 4}, 396, 3960)
    assert handed_on.stopped == ""
    params = {
        "kvflow": {"warm": True},
        "remote_kv_source": {"kv_request_id": "hand-on", "remote_host": "10.0.0.7", "remote_port": 5600},
    }
    assert all(body["kv_transfer_params"] == params for body in servers.warmed)
    assert [body["model"] for body in servers.warmed] == ["model", "adapter", "model", "model"]
    assert servers.warmed[1]["cache_salt"] == "tenant"


def test_the_old_server_learns_who_takes_its_place() -> None:
    servers = Servers()
    assert servers.hand_on().named
    assert servers.successor == servers.introduction


def test_a_server_that_knows_no_successors_hands_on_all_the_same() -> None:
    servers = Servers()
    servers.introduction = None
    handed_on = servers.hand_on()
    assert (handed_on.named, handed_on.outcomes) == (False, {"loaded": 4})
    assert servers.successor is None


def test_what_was_not_found_is_asked_for_once_more() -> None:
    """The first question waits for a handshake, which may take longer than `prefix_wait_s`."""
    servers = Servers("nothing", "loaded", "nothing")
    handed_on = servers.hand_on()
    assert servers.prompts == [1, 2, 3, 4, 1, 3]
    assert handed_on.outcomes == {"loaded": 4}
    servers = Servers(*["nothing"] * 8)
    assert servers.hand_on().outcomes == {"nothing": 4}


def test_it_stops_at_its_bounds() -> None:
    servers = Servers()
    handed_on = servers.hand_on(bytes_max=2500)
    assert (servers.prompts, handed_on.stopped) == ([1, 2], "the next prompt would exceed bytes_max, 2500")
    servers = Servers("loaded", "no_room")
    handed_on = servers.hand_on()
    assert (servers.prompts, handed_on.stopped) == ([1, 2], f"{NEW}: it is no_room")
    servers = Servers()
    handed_on = servers.hand_on(within_s=0.0)
    assert (servers.prompts, handed_on.stopped) == ([], "0 s have passed")


def test_a_server_that_cannot_do_its_part_is_named() -> None:
    servers = Servers("refused")
    with pytest.raises(HandOnError, match=f"{NEW}: it is refused"):
        servers.hand_on()
    servers.recent = {"reason": "this server remembers no prompts"}
    with pytest.raises(HandOnError, match=f"{OLD}: this server remembers no prompts"):
        servers.hand_on()
    with pytest.raises(HandOnError, match=f"{OLD}: /v1/models names no model"):
        hand_on(OLD, NEW, bytes_max=None, within_s=60.0, send=lambda *_: {})
    with pytest.raises(HandOnError, match=r"is KVFlowConnector its KV connector, with recent_tokens_max\?"):
        hand_on(OLD, NEW, bytes_max=None, within_s=60.0, send=lambda *_: {"data": [{"id": "m"}]})


@each("given", ["old:8000", "", "ftp://old", "http://"])
def test_a_url_is_expected(given: str) -> None:
    with pytest.raises(HandOnError, match="OLD: expected a URL such as"):
        checked_url(given, "OLD")
    assert checked_url("http://old:8000/", "OLD") == OLD
    done = CliRunner().invoke(app, ["hand-on", given, NEW])
    assert done.exit_code != 0


class Handler(BaseHTTPRequestHandler):
    """A vLLM server that remembers nothing."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer({"kv_transfer_params": {"kvflow": {"recent": {"reason": "set recent_tokens_max"}}}})

    def _answer(self, body: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_it_speaks_http(address: str) -> None:
    done = CliRunner().invoke(app, ["hand-on", address, address])
    assert done.exit_code == 1
    assert "set recent_tokens_max" in done.output
    with pytest.raises(HandOnError, match=r"http://127\.0\.0\.1:1/v1/models"):
        send_json("http://127.0.0.1:1/v1/models", None, 60.0)
