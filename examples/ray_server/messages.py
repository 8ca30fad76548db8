"""What replicas say to each other; the rest is `disaggregated.messages`. Each is asked with a PrefillRequest:

    ingress -> Decode.generate  -> Step ..., or Ended where it ends without
    decode  -> Prefill.prefill  -> Begun, then once the blocks were read PrefillReply, or Ended

Failures are values: an exception would arrive wrapped, or not at all. Beside the request stands `avoid`, the names of
replicas that have failed it, for who routes (`routing`).
"""

from __future__ import annotations

from typing import Any

from disaggregated.messages import Failure, Message


class Begun(Message, frozen=True, kw_only=True):
    """A prefill replica computes the prompt."""

    replica: str
    ticket: dict[str, Any]
    """A rendezvous with its blocks."""


class Ended(Message, frozen=True, kw_only=True):
    """An answer came to nothing."""

    failure: Failure
    replica: str = ""
    """The replica that another attempt should avoid; "" if there is none."""
