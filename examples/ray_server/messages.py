"""What replicas say to each other; the rest is in `disaggregated.messages`.

    ingress, AnswerRequest  -> Decode.generate: Step ..., or Ended
    decode, PrefillRequest  -> Prefill.prefill: Begun; the stream ends when the blocks were read; or Ended

Failures are values: an exception would arrive wrapped, or not at all. Each request comes with `avoid`, the names of
replicas that have failed it, for `routing`.
"""

from __future__ import annotations

from typing import Any

from disaggregated.messages import Count, Failure, Message, PrefillRequest


class AnswerRequest(PrefillRequest, frozen=True, kw_only=True):
    """Answer a prompt that a prefill replica computes."""

    max_tokens: Count


class Begun(Message, frozen=True, kw_only=True):
    """A prefill replica computes the prompt; `ticket` is that of its blocks."""

    replica: str
    ticket: dict[str, Any]


class Ended(Message, frozen=True, kw_only=True):
    """An answer came to nothing; the next attempt should avoid `replica`."""

    failure: Failure
    replica: str = ""
