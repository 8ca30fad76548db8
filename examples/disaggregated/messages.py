"""What routers and workers say to each other: in the demo over a socket, in the server over HTTP, in Ray by handles.

    PrefillRequest -> PrefillReply once the prompt is computed, or a Failure
    DecodeRequest  -> once the blocks are loaded each Step, or a Failure; before that an Again for each prefill
                      worker that did not give its blocks

Both may be asked at once, and meet by the request id, which nobody else knows: so the server does it. The demo asks one
after the other, and hears more of both:

    PrefillRequest -> Prefilled, Released
    DecodeRequest  -> Loaded, Step ..., Done
    Generate       -> Step ..., Done

Its workers say Ready once, and Failure in place of any answer. Tokens, not text: prompts are tokenized once, and the KV
cache and the first token go from worker to worker without the router.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
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


class Instant(Message, frozen=True, kw_only=True):
    """A moment on the clock that all processes of one machine share until it is booted again."""

    boot_id: str
    monotonic_s: float

    @classmethod
    def now(cls) -> Self:
        return cls(boot_id=BOOT_ID, monotonic_s=time.monotonic())

    def elapsed_s(self) -> float | None:
        """How long ago it was; None if it was on another machine, whose clock says nothing here."""
        return time.monotonic() - self.monotonic_s if self.boot_id == BOOT_ID else None


BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Step(Message, frozen=True, kw_only=True):
    """One new token; the last one of an answer says why it is the last."""

    token: int
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, token: int, *, eos_token_id: int, last: bool) -> Self:
        """An answer ends with the end-of-text token, or with the last token that was asked for."""
        return cls(token=token, finish_reason="stop" if token == eos_token_id else "length" if last else None)


class PrefillRequest(Message, frozen=True, kw_only=True):
    """Compute the prompt, and have it loaded meanwhile by whoever knows the request id; not if one token is all."""

    request_id: str
    prompt: TokenIds
    max_tokens: Count
    deadline_s: Seconds
    sampling: Sampling = GREEDY
    neighbours: list[str] = []
    """Addresses of workers' runtimes that may have computed the beginning of the prompt."""


class PrefillReply(Message, frozen=True, kw_only=True):
    """The prompt is computed, and this is the first token."""

    step: Step


class FirstToken(Message, frozen=True, kw_only=True):
    """What the prefill worker tells the decode worker when the prompt is computed: it travels with the blocks."""

    token: int
    computed_at: Instant


class DecodeRequest(Message, frozen=True, kw_only=True):
    """Load the blocks that a ticket's producer offers, or will; answer from the first token on.

    The prompt itself is not sent: its KV cache is.
    """

    request_id: str
    tickets: list[dict[str, Any]] = []
    """Of the prompt, at one prefill worker after the other: the first one computes it, the next when it is asked for
    (`Again`). None where they are brought (`disaggregated.decode.Bring`)."""
    prompt_count: Count
    max_tokens: Count
    """The first one included."""
    deadline_s: Seconds
    sampling: Sampling = GREEDY
    """The same as the first token is chosen with."""


class Again(Message, frozen=True, kw_only=True):
    """Among the steps of an answer, before the first: the blocks did not come, those of the next ticket are awaited."""

    again: str
    """Why they did not come."""


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


class Prefilled(Message, frozen=True, kw_only=True):
    """The prompt is computed; its blocks may be loaded with the ticket."""

    token: int
    ticket: dict[str, Any]


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
Event = Ready | Prefilled | Released | Loaded | Step | Done | Failure
