"""What routers and workers say to each other: in the demo over a socket, in the server over HTTP, in Ray by handles.

    PrefillRequest -> Offered, once the prompt has blocks; they are computed meanwhile
    DecodeRequest  -> Step ..., or a Failure

The demo's workers are also asked `Generate`, an answer without a hand-over, and say more: `Ready` once, `Loaded` before
the first step, `Done` after the last one, and `Released` when a prompt's blocks are free again.

Messages have tokens, not text: a prompt is tokenized once. The KV cache and the first token go from worker to worker,
not through the router.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import msgspec
from paged_engine import GREEDY, Sampling

FinishReason = Literal["stop", "length"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
TokenIds = Annotated[list[int], msgspec.Meta(min_length=1)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """All messages are immutable, tagged with their name, and refuse fields they do not know."""

    @classmethod
    def read(cls, text: bytes) -> Self:
        """The message in JSON. Raises msgspec.DecodeError, of which its ValidationError is one."""
        return msgspec.json.decode(text, type=cls)

    def written(self) -> bytes:
        """The same as JSON, in one line."""
        return msgspec.json.encode(self)


class Step(Message, frozen=True, kw_only=True):
    """One new token; the last one of an answer says why it is the last."""

    token: int
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, token: int, *, eos_token_id: int, last: bool) -> Self:
        """An answer ends with the end-of-text token, or with the last token that was asked for."""
        return cls(token=token, finish_reason="stop" if token == eos_token_id else "length" if last else None)


class PrefillRequest(Message, frozen=True, kw_only=True):
    """Compute a prompt, and offer its blocks while they are computed."""

    request_id: str
    prompt: TokenIds
    deadline_s: Seconds
    sampling: Sampling = GREEDY
    neighbours: list[str] = []
    """Addresses of runtimes that may have computed the beginning of the prompt."""


class Offered(Message, frozen=True, kw_only=True):
    """The prompt has blocks; `ticket` is that of their lease."""

    ticket: dict[str, Any]


class FirstToken(Message, frozen=True, kw_only=True):
    """The payload of the lease, which the decode worker gets with the last block."""

    token: int


class DecodeRequest(Message, frozen=True, kw_only=True):
    """Load the prompt's blocks, and answer from the first token on. The prompt itself is not sent: its KV cache is."""

    request_id: str
    ticket: dict[str, Any] = {}
    """Empty where `disaggregated.decode.Bring` brings tickets."""
    prompt_count: Count
    max_tokens: Count
    """The first token included."""
    deadline_s: Seconds
    sampling: Sampling = GREEDY
    """The same as the first token was chosen with."""


class FailureKind(StrEnum):
    """What went wrong, in the terms in which a router decides; see `failures`."""

    INVALID = "invalid"
    BUSY = "busy"
    PREFILL_AGAIN = "prefill_again"
    WORKER_FAILED = "worker_failed"
    WORKER_LOST = "worker_lost"
    NO_WORKER = "no_worker"
    DEADLINE = "deadline_exceeded"


class Failure(Message, frozen=True, kw_only=True):
    """A request, or the start of a worker, came to nothing."""

    kind: FailureKind
    message: str


# --- the demo's own


class Generate(Message, frozen=True, kw_only=True):
    """Answer the prompt without any other engine's help."""

    prompt: TokenIds
    max_tokens: Count


class Ready(Message, frozen=True):
    """The worker takes commands."""


class Released(Message, frozen=True, kw_only=True):
    """The prompt's blocks were given back, and why."""

    outcome: str


class Loaded(Message, frozen=True, kw_only=True):
    """kvflow's own report of the load."""

    sources: list[str]
    blocks: int
    descriptors: int
    size: int
    blocks_left: int
    """Of layers with a window, those that lie before it and were not read."""
    size_left: int
    seconds: dict[str, float]
    total_s: float


class Done(Message, frozen=True):
    """The stream of tokens has ended, and its blocks were given back."""


Command = PrefillRequest | DecodeRequest | Generate
Event = Ready | Offered | Released | Loaded | Step | Done | Failure
