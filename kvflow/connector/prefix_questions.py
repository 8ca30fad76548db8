"""The scheduler's questions to peers for prefixes: at most one for each request, before the request gets blocks.

A question is made when the engine first asks how much of a prompt can be loaded, and goes to the workers with the next
step. The request waits for the answer, and then uses the tickets in it.

Requests with prompts that begin alike ask in turn: each waits at most once for another request's answer. A request also
waits once for another request's load, if that brings at least half of the tokens that the request still lacks. It then
finds those tokens in the engine's prefix cache, and asks for the rest if that is worth a question. Requests that have
little in common but a system prompt load at the same time.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvflow import checks
from kvflow.checks import counted
from kvflow.connector.step import Question
from kvflow.core.protocol.addresses import side_channel_address
from kvflow.hosts import HOST_CHARS_MAX, PORT_MAX, address_at

__all__ = ["PrefixOutcome", "PrefixQuestions", "source_in"]

_SOURCE = "remote_kv_source"


class PrefixOutcome(enum.StrEnum):
    FOUND = "found"
    NOTHING = "nothing"
    SLOWER = "slower"
    """A peer has a prefix, but loading it would take longer than computing it."""
    LATE = "late"
    """The time for answers ended before every peer had answered, and no answer offered a prefix."""


def source_in(params: Mapping[str, Any] | None) -> str | None:
    """Return the address of the peer that, according to the router, holds a prefix of the prompt, or None.

    Routers of vLLM and llm-d set the key "remote_kv_source" of `params`, the `kv_transfer_params`: `{"kv_request_id":
    ..., "remote_host": ..., "remote_port": ...}`. RequestError if host and port are invalid.
    """
    named = None if params is None else params.get(_SOURCE)
    if named is None:
        return None
    source = checks.without_doubles(checks.mapping(named, _SOURCE))
    host = checks.text(source.get("remote_host"), f"{_SOURCE}: remote_host", most=HOST_CHARS_MAX)
    port = checks.whole(source.get("remote_port"), f"{_SOURCE}: remote_port", least=1, most=PORT_MAX)
    return side_channel_address(address_at(host, port), f"{_SOURCE}: remote_host, remote_port")


class _State(enum.IntEnum):
    NEW = 0
    ASKED = 1
    LOADING = 2
    """The peers have answered; if one offers a prefix, the request loads it next."""
    ENDED = 3


@dataclass(slots=True, eq=False)
class _AskingRequest:
    """A request that may ask peers for a prefix, when its turn comes."""

    keys: Sequence[bytes]
    peers: tuple[str, ...]
    use_events: bool
    state: _State = _State.NEW
    blocker: _AskingRequest | None = None
    """Request that this request waits for, or last waited for. None until this request has waited for another, and
    again once it has asked peers."""
    blocked_through: _State = _State.NEW
    """Last state of `blocker` in which this request has to wait. ASKED: until peers have answered the question of
    `blocker`. LOADING: until the load of `blocker` has ended. The value only rises."""

    def wait_for(self, other: _AskingRequest, through: _State) -> bool:
        """Have this request wait until the state of `other` is later than `through`, and return True.

        If this request has already waited, for any request, with the same or a later `through`, return False.
        """
        if through <= self.blocked_through:
            return False
        self.blocker, self.blocked_through = other, through
        return True

    def waits(self) -> bool:
        """Return True if this request still waits: the state of `blocker` is not beyond `blocked_through`."""
        return self.blocker is not None and _State.NEW < self.blocker.state <= self.blocked_through

    def keys_in_common(self, other: _AskingRequest) -> int:
        """Return how many leading prefix keys this request and `other` have in common.

        Each key depends on all tokens before it, so a binary search finds the number.
        """
        places = range(min(len(self.keys), len(other.keys)))
        return bisect_left(places, True, key=lambda at: self.keys[at] != other.keys[at])


class PrefixQuestions:
    """Decides which requests ask peers for a prefix of their prompts, and when; holds the questions for the next step.

    If the router names a peer, only that peer is asked. Otherwise `peers` are asked and, with `use_events`, all peers
    that have part of the prefix according to their KV events. No question is made for fewer than `tokens_min` tokens.
    """

    def __init__(self, peers: Sequence[str], *, block_tokens: int, tokens_min: int, use_events: bool = False) -> None:
        self._peers = tuple(peers)
        self._use_events = use_events
        self._block_tokens = block_tokens
        self._tokens_min = tokens_min
        self._requests: dict[str, _AskingRequest] = {}
        self._active_by_first_key: dict[bytes, dict[str, _AskingRequest]] = {}
        """Requests in state ASKED or LOADING, by the prefix key of their first block and by request id."""
        self._next_questions: list[Question] = []

    def __repr__(self) -> str:
        return f"<PrefixQuestions {counted(len(self._requests), 'request')}>"

    def add(self, request_id: str, keys: Sequence[bytes], source: str | None) -> None:
        """Add a request that has no ticket, unless it is too short for a question.

        `keys` has a prefix key for each block that is full even without the prompt's last token: the last token is
        always computed locally. `source` is the address of the peer that the router has named, or None.
        """
        peers, use_events = (self._peers, self._use_events) if source is None else ((source,), False)
        if (peers or use_events) and len(keys) * self._block_tokens >= self._tokens_min:
            self._requests[request_id] = _AskingRequest(keys, peers, use_events)

    def ask_or_wait(self, request_id: str, num_computed_tokens: int) -> bool:
        """Return True if the request has to wait: for its turn to ask peers, or for their answer.

        If it is the request's turn, make its question. The engine's own cache has the prompt's first
        `num_computed_tokens` tokens.
        """
        request = self._requests.get(request_id)
        if request is None or request.state is not _State.NEW:
            return request is not None and request.state is _State.ASKED
        if len(request.keys) * self._block_tokens - num_computed_tokens < self._tokens_min:
            return False
        if request.waits() or self._waits_behind_another(request, num_computed_tokens):
            return True
        request.state, request.blocker = _State.ASKED, None
        self._active_by_first_key.setdefault(request.keys[0], {})[request_id] = request
        question = Question(
            request_id=request_id,
            keys=tuple(request.keys),
            key_tokens=self._block_tokens,
            cached_tokens=num_computed_tokens,
            peers=request.peers,
            use_events=request.use_events,
        )
        self._next_questions.append(question)
        return True

    def _waits_behind_another(self, request: _AskingRequest, num_computed_tokens: int) -> bool:
        """Have `request` wait for another request with a prompt that begins alike, and return True.

        Return False if no other request is worth waiting for, or if `request` may not wait a second time.
        """
        begun = self._active_by_first_key.get(request.keys[0], {}).values()
        if begun:
            other = max(begun, key=request.keys_in_common)
            shared = request.keys_in_common(other)
            brings, leaves = shared * self._block_tokens - num_computed_tokens, len(request.keys) - shared
            if 0 < brings >= leaves * self._block_tokens and request.wait_for(other, _State.LOADING):
                return True
        asked = next((other for other in begun if other.state is _State.ASKED), None)
        return asked is not None and request.wait_for(asked, _State.ASKED)

    def take_questions(self) -> list[Question]:
        """Return the questions made since the last call, without those of ended requests."""
        asked, self._next_questions = self._next_questions, []
        return [question for question in asked if question.request_id in self._requests]

    def note_answer(self, request_id: str, *, found: bool) -> bool:
        """Record that a request's question was answered. Return True if the request was still waiting for the answer.

        `found`: a peer offers a prefix. If no peer does, requests that wait for the answered request go on, and a
        request that would ask the same peers, only for keys of the answered request, does not ask.
        """
        request = self._requests.get(request_id)
        if request is None or request.state is not _State.ASKED:
            return False
        request.state = _State.LOADING
        if not found:
            self.resume_waiters(request_id)
            for other in self._requests.values():  # no peer has any key that these would ask for
                alike = (other.peers, other.use_events) == (request.peers, request.use_events)
                if alike and other.state is _State.NEW and other.keys_in_common(request) == len(other.keys):
                    other.state = _State.ENDED
        return True

    def resume_waiters(self, request_id: str) -> None:
        """Let requests that wait for this request go on, since its load has ended or the request loads nothing."""
        request = self._requests.get(request_id)
        if request is not None:
            request.state = _State.ENDED
            begun = self._active_by_first_key.get(request.keys[0], {})
            begun.pop(request_id, None)
            if not begun:
                self._active_by_first_key.pop(request.keys[0], None)

    def finish(self, request_id: str) -> None:
        self.resume_waiters(request_id)
        self._requests.pop(request_id, None)
