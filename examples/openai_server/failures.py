"""How clients see a failure: in OpenAI's shape, which names no worker and no class of ours.

What the workers' exceptions mean is in `disaggregated.failures`. An exception that is not named there is a bug: its
worker answers 500 with a traceback in its log, and the router takes that as WORKER_FAILED.
"""

from __future__ import annotations

from dataclasses import dataclass

from disaggregated.messages import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How clients see a failure."""

    http: int
    type: str
    retry: bool
    """Whether the router tries again, with other workers where there are any."""
    says: str = ""
    """What they are told; "" is the failure's own message."""


STATUS = {
    FailureKind.INVALID: Status(http=400, type="invalid_request_error", retry=False),
    FailureKind.BUSY: Status(
        http=503, type="server_error", retry=True, says="The server is busy; try again in a few seconds."
    ),
    FailureKind.PREFILL_AGAIN: Status(
        http=502, type="server_error", retry=True, says="The prompt's cache could not be handed over; try again."
    ),
    FailureKind.WORKER_FAILED: Status(
        http=502, type="server_error", retry=True, says="The server had an error while it processed the request."
    ),
    FailureKind.WORKER_LOST: Status(
        http=502, type="server_error", retry=True, says="The server lost a worker during the request; try again."
    ),
    FailureKind.NO_WORKER: Status(
        http=503, type="server_error", retry=False, says="The server has no worker to take the request; try again."
    ),
    FailureKind.DEADLINE: Status(
        http=504, type="timeout_error", retry=False, says="The request did not end before its deadline."
    ),
}
