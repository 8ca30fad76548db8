"""What may go wrong with a request: whose fault it is, whether another try may help, what the client is told.

Workers translate exceptions into failures (`failure_of`), the router decides by their kind and logs them, and clients
get an error in OpenAI's shape (`STATUS`), which names no worker and no class of ours. An exception that is not named
here is a bug: its worker answers 500 with a traceback in its log, and the router takes that as WORKER_FAILED.

Of kvflow's errors only `blame` and `retryable` are looked at, so classes that do not exist yet have their place too.
`memory_safe` concerns nobody here: whoever has loaded keeps blocks that are not safe (`decode`).
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_engine import OutOfBlocksError

from kvflow.errors import Blame, KVFlowError
from openai_server.messages import Failure, FailureKind


class RequestTooLongError(ValueError):
    """More tokens than a worker's cache or the model can ever hold."""


class NoFirstTokenError(ValueError):
    """What has come with a prompt's blocks is no first token, as from a prefill worker of another version."""


EXPECTED_ERRORS = (KVFlowError, OutOfBlocksError, RequestTooLongError, NoFirstTokenError)


def failure_of(error: Exception) -> Failure:
    """What the router is told of one of EXPECTED_ERRORS."""
    if isinstance(error, RequestTooLongError):
        return Failure(kind=FailureKind.INVALID, message=str(error))
    return Failure(kind=_kind_of(error), message=f"{type(error).__name__}: {error}")


def _kind_of(error: Exception) -> FailureKind:
    match error:
        case RequestTooLongError():
            return FailureKind.INVALID
        case OutOfBlocksError():
            return FailureKind.BUSY
        case NoFirstTokenError():
            return FailureKind.PREFILL_AGAIN
        case KVFlowError():
            return _kind_of_kvflows(error)
        case _:
            return FailureKind.WORKER_FAILED


def _kind_of_kvflows(error: KVFlowError) -> FailureKind:
    """Whose fault it was says what may help. `retryable` is about the same call with the same ticket, which is not made
    again: the next attempt has a ticket of its own.
    """
    match error.blame, error.retryable:
        case (Blame.PEER, _) | (Blame.NOBODY, False):
            return FailureKind.PREFILL_AGAIN  # these blocks cannot be had, others can
        case (Blame.NOBODY, True):
            return FailureKind.DEADLINE  # it only needs more time, and that is what the request has not
        case (Blame.ENGINE, True):
            return FailureKind.BUSY
        case _:  # kvflow is broken here; or its caller is, which is us, unless something has changed the ticket
            return FailureKind.WORKER_FAILED


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

CODES = {FailureKind.INVALID: "context_length_exceeded"}
"""What OpenAI calls a failure; the others are called by their kind."""
