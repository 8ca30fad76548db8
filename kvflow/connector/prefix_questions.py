"""Questions to peers for prefixes, as a scheduler's half decides them: one for a request, before it gets blocks.

The first time that an engine asks how much of a prompt can come from remote, a question is made, which leaves with the
next step. Until the answer is back with a step's results the request waits. What was found is then a ticket like any
other.

Requests whose prompts begin alike ask in turn: each waits for one answer to another at most. It also waits for a load,
once, if that brings at least as much of its prompt as is left: then it finds that in the engine's prefix cache, and
asks for the rest if that is worth it. Requests that share a system prompt and little else load side by side.
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
from kvflow.errors import RequestError
from kvflow.hosts import HOST_CHARS_MAX, PORT_MAX, address_at, is_host, plain_host

__all__ = ["PrefixOutcome", "PrefixQuestions", "source_in"]

_SOURCE = "remote_kv_source"


class PrefixOutcome(enum.StrEnum):
    """Outcome of a question."""

    FOUND = "found"
    NOTHING = "nothing"
    SLOWER = "slower"
    """Something was found whose load takes longer than computing it."""
    LATE = "late"
    """Nothing was found, and somebody's answer was waited for until the end."""


def source_in(params: Mapping[str, Any] | None) -> str | None:
    """The address of the peer that a router has named as holding a prompt's prefix; None if it has named none.

    Routers of vLLM and llm-d write `{"remote_kv_source": {"kv_request_id", "remote_host", "remote_port"}}`.
    RequestError if that cannot be an address.
    """
    given = None if params is None else params.get(_SOURCE)
    if given is None:
        return None
    source = checks.without_doubles(checks.mapping(given, _SOURCE))
    given = checks.text(source.get("remote_host"), f"{_SOURCE}: remote_host", most=HOST_CHARS_MAX)
    port = checks.whole(source.get("remote_port"), f"{_SOURCE}: remote_port", least=1, most=PORT_MAX)
    host = plain_host(given)
    if host is None or not is_host(host):
        raise RequestError(f"{_SOURCE}: remote_host {checks.shown(given)} is no host to connect to")
    return address_at(host, port)


class _State(enum.IntEnum):
    NEW = 0
    ASKED = 1
    LOADING = 2
    """Something was found."""
    OVER = 3


@dataclass(slots=True, eq=False)
class _Asking:
    """A request that asks, once it is its turn."""

    keys: Sequence[bytes]
    peers: tuple[str, ...]
    hinted: bool
    state: _State = _State.NEW
    behind: _Asking | None = None
    """The request that it waits for."""
    waited: _State = _State.NEW
    """State of another request up to which it waits, or has waited: once for a load, before that for an answer."""

    def wait_for(self, other: _Asking, through: _State) -> bool:
        """Wait until another request is beyond a state. Return False if this one has waited so before."""
        if through <= self.waited:
            return False
        self.behind, self.waited = other, through
        return True

    def waits(self) -> bool:
        """Return True while the request that it waits for is not as far."""
        return self.behind is not None and _State.NEW < self.behind.state <= self.waited

    def shared(self, other: _Asking) -> int:
        """Return the number of keys that both begin with. A key is of all tokens before it, so the search may halve."""
        places = range(min(len(self.keys), len(other.keys)))
        return bisect_left(places, True, key=lambda at: self.keys[at] != other.keys[at])


class PrefixQuestions:
    """Requests whose prompts may begin with what a peer has.

    `peers` are asked where no router names one, and with `hinted` those that KV events name; fewer than `tokens_min`
    tokens are not asked for.
    """

    def __init__(self, peers: Sequence[str], *, block_tokens: int, tokens_min: int, hinted: bool = False) -> None:
        self._peers = tuple(peers)
        self._hinted = hinted
        self._block_tokens = block_tokens
        self._tokens_min = tokens_min
        self._requests: dict[str, _Asking] = {}
        self._begun: dict[bytes, dict[str, _Asking]] = {}
        """The requests that have asked, or load, by the key of their first block."""
        self._next: list[Question] = []

    def __repr__(self) -> str:
        return f"<PrefixQuestions {counted(len(self._requests), 'request')}>"

    def add(self, request_id: str, keys: Sequence[bytes], source: str | None) -> None:
        """Take a request that gets nothing from a prefill engine.

        `keys` are those of its full blocks without its last token, which is computed in any case; `source` is the peer
        that its router has named.
        """
        peers, hinted = (self._peers, self._hinted) if source is None else ((source,), False)
        if (peers or hinted) and len(keys) * self._block_tokens >= self._tokens_min:
            self._requests[request_id] = _Asking(keys, peers, hinted)

    def waits(self, request_id: str, num_computed_tokens: int) -> bool:
        """Ask for a request when it is its turn. True while it waits for that, or for an answer."""
        request = self._requests.get(request_id)
        if request is None or request.state is not _State.NEW:
            return request is not None and request.state is _State.ASKED
        if len(request.keys) * self._block_tokens - num_computed_tokens < self._tokens_min:
            return False
        if request.waits() or self._waits_behind_another(request, num_computed_tokens):
            return True
        request.state, request.behind = _State.ASKED, None
        self._begun.setdefault(request.keys[0], {})[request_id] = request
        question = Question(
            request_id=request_id,
            keys=tuple(request.keys),
            key_tokens=self._block_tokens,
            cached_tokens=num_computed_tokens,
            peers=request.peers,
            hinted=request.hinted,
        )
        self._next.append(question)
        return True

    def _waits_behind_another(self, request: _Asking, num_computed_tokens: int) -> bool:
        """Have a request wait for another one, if that is worth it and it has not waited so before."""
        begun = self._begun.get(request.keys[0], {}).values()
        if begun:
            other = max(begun, key=request.shared)
            shared = request.shared(other)
            brings, leaves = shared * self._block_tokens - num_computed_tokens, len(request.keys) - shared
            if 0 < brings >= leaves * self._block_tokens and request.wait_for(other, _State.LOADING):
                return True
        asked = next((other for other in begun if other.state is _State.ASKED), None)
        return asked is not None and request.wait_for(asked, _State.ASKED)

    def take(self) -> list[Question]:
        """Hand over the questions that leave with this step."""
        taken, self._next = [one for one in self._next if one.request_id in self._requests], []
        return taken

    def answered(self, request_id: str, *, found: bool) -> bool:
        """Take the answer to a question. True if the request still waits for it.

        If nothing was `found`, that answers for the requests whose keys were all asked for, too, and for no others.
        """
        request = self._requests.get(request_id)
        if request is None or request.state is not _State.ASKED:
            return False
        request.state = _State.LOADING
        if not found:
            self.over(request_id)
            for other in self._requests.values():  # of all that these ask for nobody has anything
                alike = (other.peers, other.hinted) == (request.peers, request.hinted)
                if alike and other.state is _State.NEW and other.shared(request) == len(other.keys):
                    other.state = _State.OVER
        return True

    def over(self, request_id: str) -> None:
        """Let others go on that wait for a request: its load has ended, or there will be none."""
        request = self._requests.get(request_id)
        if request is not None:
            request.state = _State.OVER
            begun = self._begun.get(request.keys[0], {})
            begun.pop(request_id, None)
            if not begun:
                self._begun.pop(request.keys[0], None)

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.over(request_id)
        self._requests.pop(request_id, None)
