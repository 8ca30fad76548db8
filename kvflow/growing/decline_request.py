"""The side-channel message that redirects the readers of a request to another engine. The reply is an `Ack`."""

from __future__ import annotations

from kvflow.checks import built
from kvflow.core.bounds import Reason, RequestName
from kvflow.core.protocol import messages


@built
class DeclineRequest(messages.ReaderRequest, frozen=True, kw_only=True, tag="decline"):
    """Notice that a router has sent a request to the sender's engine, while readers of the request wait at this rank.

    The rank answers these readers with `reason` and `instead`. The secret request id authorizes the notice.
    """

    request_id: RequestName
    reason: Reason
    """Reason of the `LeaseAnswer` that the waiting readers get."""
    instead: messages.Redirect = b""
    """Pending ticket of the engine from which readers can load the request, encoded as in `LeaseAnswer.instead`."""


REQUEST = DeclineRequest
