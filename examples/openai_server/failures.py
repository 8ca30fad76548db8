"""The HTTP error for each kind of failure, in OpenAI's format. It names no worker and no class of this server.

`disaggregated.failures` translates the workers' exceptions into failures. Any other exception is a bug: the worker
answers 500 and logs a traceback, and the router treats that as WORKER_FAILED.
"""

from __future__ import annotations

from dataclasses import dataclass

from disaggregated.messages import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The error that clients get for a kind of failure."""

    http: int
    retry: bool
    """True if the router makes another attempt, with other workers if there are any."""
    message: str = ""
    """Message for the client; "" for the failure's own message."""


STATUS = {
    FailureKind.INVALID: Status(http=400, retry=False),
    FailureKind.BUSY: Status(http=503, retry=True, message="The server is busy; try again in a few seconds."),
    FailureKind.PREFILL_AGAIN: Status(http=502, retry=True, message="The prompt's cache did not arrive; try again."),
    FailureKind.WORKER_FAILED: Status(http=502, retry=True, message="The server had an error; try again."),
    FailureKind.WORKER_LOST: Status(http=502, retry=True, message="The server lost a worker; try again."),
    FailureKind.NO_WORKER: Status(http=503, retry=False, message="The server has no worker left; try again."),
    FailureKind.DEADLINE: Status(http=504, retry=False, message="The request did not end before its deadline."),
}
