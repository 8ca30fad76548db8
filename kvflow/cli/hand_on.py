"""`kvflow hand-on`: a vLLM server that is taken out of service hands its most recent prompts on to its successor.

The old server says which prompts it has answered last (`kvflow.vllm.recent_prompts`). For each, the new server gets a
request that reads the prompt's blocks from the old one (`kvflow.vllm.warming`). Both are ordinary completions.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvflow.hosts import split_address

TOKENS_MAX = 1 << 40

Send: TypeAlias = Callable[[str, Mapping[str, Any] | None, float], Any]
"""Function that sends a JSON body (None: a GET) to a URL, within some seconds, and returns the decoded answer."""


class HandOnError(Exception):
    """A server does not answer as it should. The message names the server."""


@dataclass(slots=True)
class HandedOnPrompts:
    """What has been handed on so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of prompts by the outcome that the successor gave."""
    tokens: int = 0
    """Number of tokens that the successor has read."""
    size_bytes: int = 0
    """Number of bytes that one rank of the successor has read."""
    stopped: str = ""
    """Why not all prompts were offered; "" if they were."""
    named: bool = False
    """True if the old server has learned of the new one, and names it to its readers when it stops. Older versions of
    kvflow do not."""


def send_json(url: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
    """Send a JSON body to a URL, or GET it if `body` is None, and return the decoded answer. Raise HandOnError."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            return json.load(answer)
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError and HTTPError are OSErrors
        raise HandOnError(f"{url}: {error}") from error


def hand_on(old: str, new: str, *, bytes_max: int | None, within_s: float, send: Send) -> HandedOnPrompts:
    """Warm the vLLM server at `new` with the most recent prompts of the server at `old`, the most recent first.

    Stop before one rank of the new server has read more than `bytes_max` (None: no bound), after `within_s`, or when
    the new server has no room. A prompt of which nothing was found is offered once more, after the others: the new
    server may have been connecting to the old one. Raise HandOnError if a server cannot do its part.
    `send` is `send_json`, but for tests.
    """
    give_up_s, handed_on = time.monotonic() + within_s, HandedOnPrompts()

    def ask(url: str, body: Mapping[str, Any] | None = None) -> Any:
        return send(url, body, max(give_up_s - time.monotonic(), 1e-3))

    recent = _recent_prompts(old, ask)
    host, port = split_address(recent["holder"], what=f"{old}: its address")
    source = {"kv_request_id": "hand-on", "remote_host": host, "remote_port": port}
    model = _model(new, ask)
    handed_on.named = _name_successor(old, new, model, ask)
    left = [(request, True) for request in recent["requests"]]
    while left and not handed_on.stopped:
        request, again = left.pop(0)
        if time.monotonic() >= give_up_s:
            handed_on.stopped = f"{within_s:g} s have passed"
        elif (
            bytes_max is not None and handed_on.size_bytes + len(request["prompt"]) * recent["token_bytes"] > bytes_max
        ):
            handed_on.stopped = f"the next prompt would exceed bytes_max, {bytes_max}"
        else:
            params = {"kvflow": {"warm": True}, "remote_kv_source": source}
            body = {"model": model, **request, "max_tokens": 1, "kv_transfer_params": params}
            warm = _answer_in(ask(f"{new}/v1/completions", body), "warm", new)
            if warm["outcome"] == "refused":
                raise HandOnError(f"{new}: {warm.get('reason')}")
            if warm["outcome"] == "nothing" and not warm["cached_tokens"] and again:
                left.append((request, False))
                continue
            handed_on.outcomes[warm["outcome"]] += 1
            handed_on.tokens += warm["loaded_tokens"]
            handed_on.size_bytes += warm["loaded_tokens"] * recent["token_bytes"]
            if warm["outcome"] == "no_room":
                handed_on.stopped = f"{new}: {warm.get('reason')}"
    return handed_on


def _model(server: str, ask: Callable[..., Any]) -> str:
    """Return the name of the model that a server serves."""
    answer = ask(f"{server}/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise HandOnError(f"{server}: /v1/models names no model") from error


def _recent_prompts(server: str, ask: Callable[..., Any]) -> Any:
    """Ask a server for its most recent prompts. HandOnError if it remembers none."""
    params = {"kvflow": {"recent": TOKENS_MAX}}
    body = {"model": _model(server, ask), "prompt": [1], "max_tokens": 1, "kv_transfer_params": params}
    recent = _answer_in(ask(f"{server}/v1/completions", body), "recent", server)
    if "requests" not in recent:
        raise HandOnError(f"{server}: {recent.get('reason')}")
    return recent


def _name_successor(old: str, new: str, model: str, ask: Callable[..., Any]) -> bool:
    """Have the old server name the new one to its readers. Return False if one of the two does not know the question.

    `model` is the new server's.
    """

    def told(server: str, model: str, question: Mapping[str, Any]) -> Any:
        body = {"model": model, "prompt": [1], "max_tokens": 1, "kv_transfer_params": question}
        answer = ask(f"{server}/v1/completions", body)
        params = answer.get("kv_transfer_params") if isinstance(answer, Mapping) else None
        return params.get("kvflow") if isinstance(params, Mapping) else None

    introduced = told(new, model, {"kvflow": {"introduce": True}})
    if not isinstance(introduced, Mapping) or not introduced.get("introduction"):
        return False
    named = told(old, _model(old, ask), {"kvflow": {"successor": introduced["introduction"]}})
    return isinstance(named, Mapping) and "engine_id" in (named.get("successor") or {})


def _answer_in(answer: Any, what: str, server: str) -> Any:
    """Return what kvflow has put into a completion. HandOnError if there is nothing."""
    try:
        return answer["kv_transfer_params"]["kvflow"][what]
    except (KeyError, TypeError) as error:
        setting = ", with recent_tokens_max" if what == "recent" else ""
        hint = f"is KVFlowConnector its KV connector{setting}?"
        raise HandOnError(f"{server}: its answer has no kvflow.{what}: {hint}") from error


def checked_url(given: str, what: str) -> str:
    """Return the URL of a server without a slash at its end. HandOnError if it is none."""
    parts = urllib.parse.urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise HandOnError(f"{what}: expected a URL such as http://10.0.0.7:8000, got {given!r}")
    return given.rstrip("/")
