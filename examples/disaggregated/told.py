"""What workers tell of their work: nothing, where nobody counts; the server's metrics do (`openai_server.metrics`)."""

from __future__ import annotations

import logging

import kvflow
from disaggregated.failures import failure_of
from disaggregated.messages import Failure, FailureKind

logger = logging.getLogger(__name__)


class Told:
    """Is told what happens, and does nothing about it."""

    def computed(self, token_count: int) -> None:
        """A prompt is computed, or one token more of an answer."""

    def lease_ended(self, outcome: kvflow.LeaseOutcome) -> None:
        """A prompt's blocks are not on offer any more."""

    def loaded(self, report: kvflow.LoadReport) -> None:
        """A prompt's blocks are here."""

    def handed_over(self, elapsed_s: float) -> None:
        """The time from the end of a prompt's computation to the moment in which its first decode step is asked for."""

    def failed(self, kind: str) -> None:
        """A request came to nothing."""


def reported(error: Exception, told: Told) -> Failure:
    """What the router is told of an error, once it has been counted; logged if it is one that should not be."""
    failure = failure_of(error)
    told.failed(failure.kind)
    if failure.kind is FailureKind.WORKER_FAILED:
        logger.error("a request has failed, and should not have: %s", failure.message, exc_info=error)
    return failure
