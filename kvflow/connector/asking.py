"""Questions to peers for prefixes, as a scheduler's half decides them: one for a request, before it gets blocks.

An engine's scheduler asks here whether a request waits for its peers. The first time, that makes a question, which
leaves with the next step; until the answer is back with a step's results, the request waits. Whatever was found is then
a ticket like any other.

Requests whose prompts begin alike take turns: one asks and loads. The others wait for it, find in the engine's prefix
cache what it has loaded, and ask for the rest if that is worth it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvflow import checks
from kvflow.connector.step import Question
from kvflow.errors import RequestError
from kvflow.hosts import HOST_CHARS_MAX, PORT_MAX, address_at, is_host, plain_host

__all__ = ["Asking", "source_in"]

_SOURCE = "remote_kv_source"


def source_in(params: Mapping[str, Any] | None) -> str | None:
    """The address of the peer that a router has named as holding a prompt's prefix; None if it has named none.

    Routers of vLLM and llm-d write `{"remote_kv_source": {"kv_request_id", "remote_host", "remote_port"}}`.
    RequestError if that cannot be an address.
    """
    given = None if params is None else params.get(_SOURCE)
    if given is None:
        return None
    source = checks.mapping(given, _SOURCE)
    given = checks.text(source.get("remote_host"), f"{_SOURCE}: remote_host", most=HOST_CHARS_MAX)
    port = checks.whole(source.get("remote_port"), f"{_SOURCE}: remote_port", least=1, most=PORT_MAX)
    host = plain_host(given)
    if host is None or not is_host(host):
        raise RequestError(f"{_SOURCE}: remote_host {checks.shown(given)} is no host to connect to")
    return address_at(host, port)


class _State(enum.Enum):
    NEW = enum.auto()
    ASKED = enum.auto()
    ANSWERED = enum.auto()


@dataclass(slots=True)
class _Asker:
    keys: Sequence[bytes]
    peers: tuple[str, ...]
    hinted: bool
    state: _State = _State.NEW


class Asking:
    """Requests whose prompts may begin with what a peer has.

    `peers` are asked where no router names one, and with `hinted` those that KV events name; fewer than `tokens_min`
    tokens are not asked for.
    """

    def __init__(self, peers: Sequence[str], *, block_tokens: int, tokens_min: int, hinted: bool = False) -> None:
        self._peers = tuple(peers)
        self._hinted = hinted
        self._block_tokens = block_tokens
        self._tokens_min = tokens_min
        self._requests: dict[str, _Asker] = {}
        self._first: dict[bytes, str] = {}
        """The request whose turn it is to ask or load, by the key of its first block."""
        self._next: list[Question] = []

    def __repr__(self) -> str:
        return f"<Asking {len(self._requests)} requests>"

    def add(self, request_id: str, keys: Sequence[bytes], source: str | None) -> None:
        """Take a request that gets nothing from a prefill engine.

        `keys` are those of its full blocks without its last token, which is computed in any case; `source` is the peer
        that its router has named.
        """
        peers, hinted = (self._peers, self._hinted) if source is None else ((source,), False)
        if (peers or hinted) and len(keys) * self._block_tokens >= self._tokens_min:
            self._requests[request_id] = _Asker(keys, peers, hinted)

    def waits(self, request_id: str, num_computed_tokens: int) -> bool:
        """Ask for a request when it is its turn. True while it waits for that, or for an answer."""
        request = self._requests.get(request_id)
        if request is None or request.state is not _State.NEW:
            return request is not None and request.state is _State.ASKED
        if len(request.keys) * self._block_tokens - num_computed_tokens < self._tokens_min:
            return False
        if self._first.setdefault(request.keys[0], request_id) == request_id:
            request.state = _State.ASKED
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

    def take(self) -> list[Question]:
        """Hand over the questions that leave with this step."""
        taken, self._next = [one for one in self._next if one.request_id in self._requests], []
        return taken

    def answered(self, request_id: str, *, found: bool) -> bool:
        """Take the answer to a question. True if the request still waits for it."""
        request = self._requests.get(request_id)
        if request is None or request.state is not _State.ASKED:
            return False
        request.state = _State.ANSWERED
        if not found:
            self.over(request_id)
            for other in self._requests.values():  # nobody has even their first block
                if other.keys[0] == request.keys[0] and other.peers == request.peers:
                    other.state = _State.ANSWERED
        return True

    def over(self, request_id: str) -> None:
        """Give the turn on: the request's load has ended, or there will be none."""
        request = self._requests.get(request_id)
        if request is not None and self._first.get(request.keys[0]) == request_id:
            del self._first[request.keys[0]]

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.over(request_id)
        self._requests.pop(request_id, None)
