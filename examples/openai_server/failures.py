"""What may go wrong with a request: whose fault it is, whether another try may help, what the client is told.

Workers translate exceptions into failures (`failure_of`), the router decides by their kind, and clients get an error
in OpenAI's shape (`STATUS`). An exception that is not named here is a bug: its worker answers 500 with a traceback in
its log, and the router takes that as WORKER_FAILED.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_engine import OutOfBlocksError

from kvflow import errors
from openai_server.messages import Failure, FailureKind


class RequestTooLongError(ValueError):
    """More tokens than a worker's cache or the model can ever hold."""


EXPECTED_ERRORS = (errors.KVFlowError, OutOfBlocksError, RequestTooLongError)


def failure_of(error: Exception) -> Failure:
    """What the router is told of one of EXPECTED_ERRORS."""
    return Failure(kind=_kind_of(error), message=f"{type(error).__name__}: {error}")


def _kind_of(error: Exception) -> FailureKind:
    match error:
        case RequestTooLongError():
            return FailureKind.INVALID
        case OutOfBlocksError():
            return FailureKind.BUSY
        case errors.DeadlineExceeded():
            return FailureKind.DEADLINE
        case errors.LeaseExpired() | errors.TransferFailed() | errors.PeerError():
            return FailureKind.PREFILL_AGAIN
        case _:
            return FailureKind.WORKER_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How clients see a failure."""

    http: int
    type: str
    retry: bool
    """Whether the router tries again, with other workers where there are any."""


STATUS = {
    FailureKind.INVALID: Status(http=400, type="invalid_request_error", retry=False),
    FailureKind.BUSY: Status(http=503, type="server_error", retry=True),
    FailureKind.PREFILL_AGAIN: Status(http=502, type="server_error", retry=True),
    FailureKind.WORKER_FAILED: Status(http=502, type="server_error", retry=True),
    FailureKind.WORKER_LOST: Status(http=502, type="server_error", retry=True),
    FailureKind.NO_WORKER: Status(http=503, type="server_error", retry=False),
    FailureKind.DEADLINE: Status(http=504, type="timeout_error", retry=False),
}
