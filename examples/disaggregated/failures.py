"""What may go wrong with a request in a worker: whose fault it is, and what a router may do about it.

Workers translate exceptions into failures (`failure_of`), and routers decide by their kind. An exception that is not
named here is a bug, and its worker's traceback is in its log.

Of kvflow's errors only `blame` and `retryable` are looked at, so classes that do not exist yet have their place too.
`memory_safe` concerns nobody here: whoever has loaded keeps blocks that are not safe (`keeper`).
"""

from __future__ import annotations

from paged_engine import Engine, OutOfBlocksError

from disaggregated.messages import Failure, FailureKind
from kvflow.errors import Blame, KVFlowError


class RequestTooLongError(ValueError):
    """More tokens than a worker's cache or the model can ever hold."""


class NoFirstTokenError(ValueError):
    """What has come with a prompt's blocks is no first token, as from a prefill worker of another version."""


EXPECTED_ERRORS = (KVFlowError, OutOfBlocksError, RequestTooLongError, NoFirstTokenError)


def require_length(engine: Engine, prompt_count: int, max_tokens: int) -> None:
    """RequestTooLongError for what no worker can hold: all engines have the same room."""
    token_count = prompt_count + max_tokens
    if token_count > engine.token_count_max:
        raise RequestTooLongError(
            f"This model's maximum context length is {engine.token_count_max} tokens. However, you requested "
            f"{token_count} tokens ({prompt_count} in the prompt, {max_tokens} in the completion)."
        )


def failure_of(error: Exception) -> Failure:
    """What the router is told of an error."""
    if isinstance(error, RequestTooLongError):
        return Failure(kind=FailureKind.INVALID, message=str(error))
    return Failure(kind=_kind_of(error), message=f"{type(error).__name__}: {error}")


def _kind_of(error: Exception) -> FailureKind:
    match error:
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
