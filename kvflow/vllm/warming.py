"""Warming: requests that fill vLLM's prefix cache from peers, before other requests come.

A router sets `"kv_transfer_params": {"kvflow": {"warm": true}}`. The request asks peers like any other, and loads what
they have. vLLM ends no request that has computed nothing, so the prompt is cut one token behind the loaded ones: that
token alone is computed, whatever the peers have. The answer's `kv_transfer_params` say what was found.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvflow import checks
from kvflow.checks import counted
from kvflow.connector.step import Matched
from kvflow.errors import RequestError
from kvflow.logs import logger_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = logger_of("vllm.kvflow")


class WarmOutcome(enum.StrEnum):
    """What has become of a request that warms the cache."""

    LOADED = "loaded"
    NOTHING = "nothing"
    """No peer has more of the prompt than this server's own cache."""
    NO_ROOM = "no_room"
    FAILED = "failed"
    REFUSED = "refused"
    """The request cannot warm this server at all; its `reason` says why."""


@dataclass(slots=True)
class _Warm:
    request: Request
    outcome: WarmOutcome = WarmOutcome.NOTHING
    reason: str = ""
    cached: int = 0
    """Number of the prompt's tokens in this server's own cache."""
    loaded: int = 0


class WarmRequests:
    """The requests in vLLM's scheduler that warm the cache."""

    def __init__(self, block_tokens: int, *, pulls: bool, on_end: Callable[[WarmOutcome], None]) -> None:
        """`pulls`: this server pulls prefixes. `on_end` is called with the outcome of each request."""
        self._block_tokens = block_tokens
        self._pulls = pulls
        self._on_end = on_end
        self._requests: dict[str, _Warm] = {}
        self._pool: BlockPool | None = None

    def bind_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    def add(self, request: Request) -> None:
        """Note a new request, if it is one that warms the cache. The server answers it with one token."""
        try:
            if not _asks_to_warm(request.kv_transfer_params):
                return
            problem = "" if self._pulls else "this server pulls no prefixes: set prefix_peers"
            if request.prompt_token_ids is None:
                problem = "its prompt has no token ids"
        except RequestError as error:
            problem = str(error)
        request.max_tokens = 1
        warm = self._requests[request.request_id] = _Warm(request)
        if problem:
            logger.warning("request %s: it warms nothing: %s", request.request_id, problem)
            warm.outcome, warm.reason = WarmOutcome.REFUSED, problem
            cut_prompt(request, 1)

    def match(self, request: Request, num_computed_tokens: int, matched: Matched) -> Matched:
        """Return `matched`, how many tokens the request can load, or 0 if there is no room for them.

        The cache has the first `num_computed_tokens` tokens. Cut the prompt one token behind those that it then has.
        May be called more than once, until vLLM has found blocks.
        """
        warm, (tokens, _) = self._requests.get(request.request_id), matched
        if warm is None or tokens is None:
            return matched
        if warm.outcome in (WarmOutcome.FAILED, WarmOutcome.REFUSED):
            cut_prompt(request, num_computed_tokens + 1)
            return 0, False
        warm.cached, warm.loaded, warm.outcome, warm.reason = num_computed_tokens, tokens, WarmOutcome.NOTHING, ""
        if tokens and (problem := self._lack_of_room(num_computed_tokens + tokens)):
            warm.loaded, warm.outcome, warm.reason = 0, WarmOutcome.NO_ROOM, problem
            matched = 0, False
        elif tokens:
            warm.outcome = WarmOutcome.LOADED
        cut_prompt(request, num_computed_tokens + warm.loaded + 1)
        return matched

    def note_failed(self, request_ids: Collection[str]) -> None:
        """Have requests whose load has failed compute no more than one token. vLLM would compute the prompt."""
        for request_id in request_ids:
            warm = self._requests.get(request_id)
            if warm is not None:
                warm.outcome, warm.reason = WarmOutcome.FAILED, "its load failed; this server's log says why"
                warm.loaded = 0
                cut_prompt(warm.request, warm.request.num_computed_tokens + 1)

    def finish(self, request: Request) -> dict[str, Any] | None:
        """Return `kv_transfer_params` that say what the request has found; None for other requests."""
        warm = self._requests.pop(request.request_id, None)
        if warm is None:
            return None
        self._on_end(warm.outcome)
        found = {"outcome": str(warm.outcome), "cached_tokens": warm.cached, "loaded_tokens": warm.loaded}
        return {"kvflow": {"warm": {**found, **({"reason": warm.reason} if warm.reason else {})}}}

    def _lack_of_room(self, num_tokens: int) -> str:
        """Return why `num_tokens` tokens and one more do not fit beside the requests that run now; "" if they do."""
        needed = num_tokens // self._block_tokens + 1
        free = needed if self._pool is None else self._pool.get_num_free_blocks()
        return "" if free >= needed else f"no room: {counted(needed, 'block')} needed, {free} free"


def _asks_to_warm(params: Mapping[str, Any] | None) -> bool:
    """Return whether a request's `kv_transfer_params` ask to warm the cache. RequestError if the value is no bool."""
    extra = (params or {}).get("kvflow")
    given = extra.get("warm", False) if isinstance(extra, Mapping) else False
    asked: bool = checks.checked(given, "kv_transfer_params: kvflow.warm", bool)
    return asked


def cut_prompt(request: Request, length: int) -> None:
    """Remove the prompt's tokens from position `length` on, if there are any, before any of them is scheduled."""
    if request.prompt_token_ids is None or length >= request.num_prompt_tokens:
        return
    request.prompt_token_ids = request.prompt_token_ids[:length]
    del request._all_token_ids[length:]
    request.num_prompt_tokens = length
