"""Failures of a request in a worker, by kinds that say what a router can do.

Workers translate exceptions into failures (`failure_of`), and routers decide by the failure's kind. Any other exception
is a bug; its traceback is in the worker's log.

A KVFlowError is judged only by `blame` and `retryable`, so error classes added later are handled, too. `memory_safe` is
not needed here: after an unsafe load `background.load_into` keeps the blocks.
"""

from __future__ import annotations

from paged_engine import Engine, OutOfBlocksError

from disaggregated.messages import Failure, FailureKind
from kvflow.errors import Blame, KVFlowError


class RequestTooLongError(ValueError):
    """The request has more tokens than the model, or the cache of any worker, can hold."""


class NoFirstTokenError(ValueError):
    """The payload of a prompt's blocks is not a first token; perhaps the prefill worker has another version."""


EXPECTED_ERRORS = (KVFlowError, OutOfBlocksError, RequestTooLongError, NoFirstTokenError)


def require_length(engine: Engine, prompt_count: int, max_tokens: int) -> None:
    """Raise RequestTooLongError if no worker can hold the request: all engines have the same size."""
    token_count = prompt_count + max_tokens
    if token_count > engine.token_count_max:
        raise RequestTooLongError(
            f"This model's maximum context length is {engine.token_count_max} tokens. However, you requested "
            f"{token_count} tokens ({prompt_count} in the prompt, {max_tokens} in the completion)."
        )


def failure_of(error: Exception) -> Failure:
    """Translate an exception into the failure that the router gets.

    `retryable` is about the same call with the same ticket. The router never repeats that: each attempt has a new
    ticket.
    """
    match error:
        case RequestTooLongError():
            return Failure(kind=FailureKind.INVALID, message=str(error))
        case OutOfBlocksError() | KVFlowError(blame=Blame.ENGINE, retryable=True):
            kind = FailureKind.BUSY
        case NoFirstTokenError() | KVFlowError(blame=Blame.PEER) | KVFlowError(blame=Blame.NOBODY, retryable=False):
            kind = FailureKind.PREFILL_AGAIN  # these blocks cannot be loaded, but another worker's can
        case KVFlowError(blame=Blame.NOBODY):
            kind = FailureKind.DEADLINE  # only more time would help, and the request has none
        case _:  # a bug in kvflow or in this worker, or a ticket that was changed in transit
            kind = FailureKind.WORKER_FAILED
    return Failure(kind=kind, message=f"{type(error).__name__}: {error}")
