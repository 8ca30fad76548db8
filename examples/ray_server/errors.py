"""Reads the stream of a replica, and translates its end and Ray's errors into the failures that the front knows."""

from __future__ import annotations

from typing import Any

from disaggregated.messages import Failure, FailureKind
from openai_server.attempts import AttemptError
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentResponseGenerator

from ray_server.messages import Ended


async def next_message(response: DeploymentResponseGenerator[Any], deployment: str) -> Any:
    """Return the next message of a replica of `deployment`. Raises AttemptError if the stream failed or ended."""
    try:
        said = await anext(response)
    except StopAsyncIteration:
        said = Ended(failure=Failure(kind=FailureKind.WORKER_LOST, message=f"a {deployment} replica said no more"))
    except (RayError, RayServeException) as error:
        message = f"{deployment}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise AttemptError(Failure(kind=_kind_of(error), message=message)) from error
    if isinstance(said, Ended):
        raise AttemptError(said.failure, said.replica or None)
    return said


def _kind_of(error: Exception) -> FailureKind:
    match error:
        case BackPressureError():
            return FailureKind.BUSY
        case RayTaskError():  # a bug in this server: its replica lives, and has logged it
            return FailureKind.WORKER_FAILED
        case _:
            return FailureKind.WORKER_LOST
