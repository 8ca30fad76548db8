"""Messages between routers and workers: over a pipe in the demo, over HTTP in the server, by handles in Ray.

    PrefillRequest -> Offered, once the prompt has blocks; its computation goes on meanwhile
    DecodeRequest  -> Step ..., or a Failure

The demo's workers also take `Generate`, and answer with the values alone (see `worker`).

Messages carry tokens, not text: a prompt is tokenized once. The KV cache and the first token go from worker to worker,
not through the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import msgspec
from paged_engine import GREEDY, Sampling

import kvflow

FinishReason = Literal["stop", "length"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
TokenIds = Annotated[list[int], msgspec.Meta(min_length=1)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, tagged with the class's name, and strict about unknown fields."""

    @classmethod
    def read(cls, text: bytes) -> Self:
        """Decode a message from JSON. Raises msgspec.DecodeError, or its subclass ValidationError."""
        return msgspec.json.decode(text, type=cls)

    def written(self) -> bytes:
        """Return the message as one line of JSON."""
        return msgspec.json.encode(self)


class Step(Message, frozen=True, kw_only=True):
    """One new token of an answer. The last token has a `finish_reason`."""

    token: int
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, token: int, *, eos_token_id: int, last: bool) -> Self:
        """Make a step. Its finish reason is "stop" for the end-of-text token, "length" if `last`, else None."""
        return cls(token=token, finish_reason="stop" if token == eos_token_id else "length" if last else None)


class PrefillRequest(Message, frozen=True, kw_only=True):
    """Command: compute a prompt, and offer its blocks meanwhile."""

    request_id: str
    prompt: TokenIds
    deadline_s: Seconds
    sampling: Sampling = GREEDY
    neighbours: list[str] = []
    """Addresses of runtimes that may already hold the beginning of the prompt."""
    offer_id: str = ""
    """Secret id of the offer, the same for all ranks of the engine; empty: its only rank makes one."""


class Offered(Message, frozen=True, kw_only=True):
    """Event: the prompt has blocks. `ticket` is the ticket of their lease."""

    ticket: dict[str, Any]


class FirstToken(Message, frozen=True, kw_only=True):
    """The first token of an answer: the payload of the lease, which the decode worker gets with the last block."""

    token: int


class DecodeRequest(Message, frozen=True, kw_only=True):
    """Command: load a prompt's KV cache, and answer from the first token on. The prompt itself is not sent."""

    request_id: str
    ticket: dict[str, Any] = {}
    """Ticket of the prompt's lease; empty if a `disaggregated.decode.NextTicket` gets tickets."""
    prompt_count: Count
    max_tokens: Count
    """Maximum length of the answer, the first token included."""
    deadline_s: Seconds
    sampling: Sampling = GREEDY
    """Sampling parameters, equal to those of the PrefillRequest, with which the first token was chosen."""


class AnswerRequest(Message, frozen=True, kw_only=True):
    """A request for a whole answer, which one worker prefills and another one decodes."""

    request_id: str
    prompt: TokenIds
    max_tokens: Count
    deadline_s: Seconds
    sampling: Sampling = GREEDY

    def prefill_request(self, neighbours: Sequence[str] = ()) -> PrefillRequest:
        return PrefillRequest(
            request_id=self.request_id,
            prompt=self.prompt,
            deadline_s=self.deadline_s,
            sampling=self.sampling,
            neighbours=list(neighbours),
            offer_id=kvflow.secret_id(self.request_id),  # also the client knows the request's own id
        )

    def decode_request(self, ticket: dict[str, Any] | None = None) -> DecodeRequest:
        """Return the request to a decode worker. `ticket` is the prefill worker's."""
        return DecodeRequest(
            request_id=self.request_id,
            ticket=ticket or {},
            prompt_count=len(self.prompt),
            max_tokens=self.max_tokens,
            deadline_s=self.deadline_s,
            sampling=self.sampling,
        )


class FailureKind(StrEnum):
    """Kind of a failure, by which a router decides what to do. See `failures`."""

    INVALID = "invalid"
    BUSY = "busy"
    PREFILL_AGAIN = "prefill_again"
    WORKER_FAILED = "worker_failed"
    WORKER_LOST = "worker_lost"
    NO_WORKER = "no_worker"
    DEADLINE = "deadline_exceeded"


class Failure(Message, frozen=True, kw_only=True):
    """Event: a request failed, or a worker could not start."""

    kind: FailureKind
    message: str


class Generate(Message, frozen=True, kw_only=True):
    """Command of the demo: answer a prompt with this engine alone."""

    prompt: TokenIds
    max_tokens: Count
