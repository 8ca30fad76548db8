"""The prompts that vLLM has answered last, so that a server that takes this one's place can be warmed with them.

vLLM finds a block by a hash of the prompt's tokens, which differs from server to server. So a successor needs the
tokens. vLLM tells no connector that the server is going to be stopped; an operator asks before, by a request with
`"kv_transfer_params": {"kvflow": {"recent": N}}`. The answer's `kv_transfer_params` have requests of at most N tokens
in all, each of which warms the successor (`kvflow.vllm.warming`). `kvflow hand-on` does both.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvflow import checks
from kvflow.checks import Size
from kvflow.errors import RequestError
from kvflow.logs import logger_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logger_of("vllm.kvflow")


@dataclass(frozen=True, slots=True)
class _Answered:
    """The tokens of a prompt and its answer, of which the blocks were in the cache when the request ended."""

    tokens: array[int]
    more: dict[str, str]
    """Other fields of the request, with which the same blocks are found: the cache salt, the adapter's name."""


class RecentPrompts:
    """The most recently answered prompts in vLLM's scheduler, up to `tokens_max` tokens in all; none if that is 0."""

    def __init__(self, tokens_max: int, block_tokens: int, token_bytes: int) -> None:
        """`token_bytes`: size of a token in the cache of one rank, for the answer."""
        self._tokens_max = tokens_max
        self._block_tokens = block_tokens
        self._token_bytes = token_bytes
        self.holder = ""
        """Address at which this server answers questions for prefixes; "" until the workers are known."""
        self._tokens = 0
        self._prompts: OrderedDict[bytes, _Answered] = OrderedDict()
        """The prompts by vLLM's hash of their last full block, the one that was answered first first."""
        self._asking: dict[str, int | str] = {}
        """Requests that ask for prompts: the most tokens that they ask for, or why they are refused."""

    def add(self, request: Request) -> None:
        """Note a new request, if it asks for recent prompts."""
        extra = (request.kv_transfer_params or {}).get("kvflow")
        if not isinstance(extra, Mapping) or "recent" not in extra:
            return
        request.max_tokens = 1
        try:
            if not self._tokens_max:
                raise RequestError("this server remembers no prompts: set recent_tokens_max")
            most: int = checks.checked(extra["recent"], "kv_transfer_params: kvflow.recent", Size)
            self._asking[request.request_id] = most
        except RequestError as error:
            logger.warning("request %s: it gets no recent prompts: %s", request.request_id, error)
            self._asking[request.request_id] = str(error)

    def finish(self, request: Request) -> dict[str, Any] | None:
        """Remember the prompt of an ended request. If it has asked for prompts, return them as `kv_transfer_params`."""
        asked = self._asking.pop(request.request_id, None)
        if asked is None:
            if self._tokens_max:
                self._remember(request)
            return None
        if isinstance(asked, str):
            return {"kvflow": {"recent": {"reason": asked}}}
        requests = []
        for answered in reversed(self._prompts.values()):
            asked -= len(answered.tokens)
            if asked < 0:
                break
            requests.append({"prompt": answered.tokens.tolist(), **answered.more})
        return {"kvflow": {"recent": {"holder": self.holder, "token_bytes": self._token_bytes, "requests": requests}}}

    def forget_all(self) -> None:
        """Forget all prompts: their blocks are no longer valid."""
        self._prompts.clear()
        self._tokens = 0

    def _remember(self, request: Request) -> None:
        """Remember the full blocks of an ended request, in place of the turns of a conversation that it continues.

        One token more is kept, since no request loads its last token. A prompt with pictures or embeddings is left out:
        its tokens do not say what is in its blocks.
        """
        hashes = request.block_hashes
        if not hashes or request.prompt_token_ids is None or request.mm_features or request.prompt_embeds is not None:
            return
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        full = computed // self._block_tokens * self._block_tokens
        for earlier in hashes:
            self._drop(earlier)
        if not 0 < full < self._tokens_max:
            return
        more = {}
        if request.cache_salt:
            more["cache_salt"] = request.cache_salt
        if request.lora_request is not None:
            more["model"] = request.lora_request.lora_name
        tokens = array("q", request.all_token_ids[: full + 1])
        self._prompts[hashes[-1]] = _Answered(tokens, more)
        self._tokens += len(tokens)
        while self._tokens > self._tokens_max:
            self._drop(next(iter(self._prompts)))

    def _drop(self, last_hash: bytes) -> None:
        answered = self._prompts.pop(last_hash, None)
        if answered is not None:
            self._tokens -= len(answered.tokens)
