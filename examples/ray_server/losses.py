"""What Ray raises when a replica cannot be asked, as the failures that the front knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from disaggregated.messages import Failure, FailureKind
from openai_server.attempts import AttemptError
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException


@contextmanager
def losses(who: str, worker: str | None = None) -> Iterator[None]:
    """Raise AttemptError for whatever Ray raises; `who` names the replica, or its deployment."""
    try:
        yield
    except (RayError, RayServeException) as error:
        message = f"{who}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise AttemptError(Failure(kind=_kind_of(error), message=message), worker) from error


def _kind_of(error: Exception) -> FailureKind:
    match error:
        case BackPressureError():
            return FailureKind.BUSY
        case RayTaskError():  # a bug of ours: its replica lives, and has logged it
            return FailureKind.WORKER_FAILED
        case _:
            return FailureKind.WORKER_LOST
