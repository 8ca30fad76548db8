"""What the router and its workers say to each other, as JSON over HTTP.

    POST   /prefill               PrefillRequest -> PrefillReply once the prompt is computed, or a Failure
    DELETE /prefill/<request id>  give up: nobody is going to load these blocks
    POST   /decode                DecodeRequest -> once the blocks are loaded a line of JSON for each Step or Failure;
                                  before that an Again for each prefill worker whose blocks did not come

Both are asked at once, and meet by the request id, which nobody else knows. Tokens, not text: prompts are tokenized
once, and the KV cache and the first token go from worker to worker without the router.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from paged_engine import GREEDY, Sampling
from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]
Seconds = float


class Message(BaseModel):
    """All messages are immutable and refuse fields they do not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Instant(Message):
    """A moment on the clock that all processes of one machine share until it is booted again."""

    boot_id: str
    monotonic_s: Seconds

    @classmethod
    def now(cls) -> Self:
        return cls(boot_id=BOOT_ID, monotonic_s=time.monotonic())

    def elapsed_s(self) -> Seconds | None:
        """How long ago it was; None if it was on another machine, whose clock says nothing here."""
        return time.monotonic() - self.monotonic_s if self.boot_id == BOOT_ID else None


BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Step(Message):
    """One new token; the last one of an answer says why it is the last."""

    token: int
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, token: int, *, eos_token_id: int, last: bool) -> Self:
        """An answer ends with the end-of-text token, or with the last token that was asked for."""
        return cls(token=token, finish_reason="stop" if token == eos_token_id else "length" if last else None)


class PrefillRequest(Message):
    """Compute the prompt, and have it loaded meanwhile by whoever knows the request id; not if one token is all."""

    request_id: str
    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    deadline_s: Seconds = Field(gt=0)
    sampling: Sampling = GREEDY


class PrefillReply(Message):
    """The prompt is computed, and this is the first token."""

    step: Step


class FirstToken(Message):
    """What the prefill worker tells the decode worker when the prompt is computed: it travels with the blocks."""

    token: int
    computed_at: Instant


class DecodeRequest(Message):
    """Load the blocks that the ticket's producer offers, or will; answer from the first token on."""

    request_id: str
    ticket: dict[str, Any]
    more: list[dict[str, Any]] = Field(default=[], max_length=15)
    """Tickets of the same prompt at other prefill workers, which have it computed when they are asked for (`Again`)."""
    prompt_count: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    """The first one included."""
    deadline_s: Seconds = Field(gt=0)
    sampling: Sampling = GREEDY
    """The same as the first token is chosen with."""


class Again(Message):
    """Among the steps of an answer, before the first: the blocks did not come, those of the next ticket are awaited."""

    again: str
    """Why they did not come."""


class FailureKind(StrEnum):
    """What went wrong, in the terms in which the router decides; see `failures`."""

    INVALID = "invalid"
    BUSY = "busy"
    PREFILL_AGAIN = "prefill_again"
    WORKER_FAILED = "worker_failed"
    WORKER_LOST = "worker_lost"
    NO_WORKER = "no_worker"
    DEADLINE = "deadline_exceeded"


class Failure(Message):
    """A request came to nothing."""

    kind: FailureKind
    message: str


class WorkerHealth(Message):
    """What a worker says of itself at /health."""

    name: str
    role: Literal["prefill", "decode"]
    pid: int
    runtime: str
    """kvflow's state; "open" is the healthy one."""
    blocks_used: int
    blocks_free: int
    introduction: dict[str, Any] | None = None
    """Of a prefill worker: a ticket that says where its blocks are to be had, for the router to make others of it."""
