"""Messages between replicas, in addition to those of `disaggregated.messages`.

    ingress, AnswerRequest  -> Decode.generate: Step ..., or Ended
    decode, PrefillRequest  -> Prefill.prefill: Begun, and the stream ends when the blocks have been read; or Ended

Failures are values, because an exception would arrive wrapped, or not at all. Each request comes with `avoid`, the
names of replicas that have already failed it, for `routing`.
"""

from __future__ import annotations

from typing import Any

from disaggregated.messages import Failure, Message


class Begun(Message, frozen=True, kw_only=True):
    """A prefill replica has begun to compute the prompt. `ticket` is the ticket of the prompt's blocks."""

    replica: str
    ticket: dict[str, Any]


class Ended(Message, frozen=True, kw_only=True):
    """A request failed. The next attempt should avoid `replica`."""

    failure: Failure
    replica: str = ""
