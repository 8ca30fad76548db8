"""Wrappers of a load's read, for loads that ask for them: an event before it, a comparison after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from kvflow.checks import said
from kvflow.core.policy.events import DeviceEvent
from kvflow.errors import ChecksumMismatch, PeerError, TransferFailed
from kvflow.logs import logger_of
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.load.load import Load, Work
from kvflow.runtime.load.requests import VERIFY, Verification
from kvflow.runtime.peers.peer import Source
from kvflow.verify.verifying import LeaseEnded, NotCompared, Verifier

logger = logger_of(__name__)


@contextmanager
def held(sources: Sequence[Source]) -> Iterator[None]:
    """Keep connections open in the transport while the block waits, or claims them."""
    for source in sources:
        source.connection.users += 1
    try:
        yield
    finally:
        for source in sources:
            source.connection.users -= 1
            if not source.connection.users and source.connection.left is not None:
                source.connection.left.set()


async def until(event: DeviceEvent, copy_thread: CopyThread, load: Load, work: Work) -> None:
    """Wait until the device does nothing to the blocks any more. TransferFailed if that will never be known."""
    work.enter("queued", lambda: "its event `after` has not happened on this engine's device")
    try:
        await copy_thread.happened(event)
    except Exception as error:
        raise work.failure(load, TransferFailed, f"its event `after` failed: {said(error)}") from error
    work.enter("plan")


class Verifying:
    """Reads, and compares with what the producer holds. If it differs, reads and compares once more."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def drawn(self) -> bool:
        """Draw one more load: True if it is of the share that is verified."""
        return self._verifier.drawn()

    async def read(self, load: Load, work: Work, read: Callable[[], Awaitable[bool]]) -> bool:
        """Read and compare. True if the lease has covered the read.

        Raises ChecksumMismatch, or why a load that has to be verified is not. Its blocks stay claimed all the time.
        """
        try:
            difference = await self._read_and_compare(work, read)
            work.verification = Verification.VERIFIED
            if difference:
                work.verification = Verification.MISMATCH
                logger.warning("load %s is read once more: %s", load.request_id, difference)
                for source in work.sources:
                    source.proof = source.proof.anew()
                difference = await self._read_and_compare(work, read)
                if difference:
                    why = f"what was read twice is not what is offered: {difference}"
                    raise work.failure(load, ChecksumMismatch, why)
                work.verification = Verification.REPAIRED
        except LeaseEnded:
            return False
        except NotCompared as problem:
            self._not_verified(load, work, problem)
        return True

    async def _read_and_compare(self, work: Work, read: Callable[[], Awaitable[bool]]) -> str:
        """Read, and give the difference in words, "" if there is none. Raises LeaseEnded or NotCompared afterwards."""
        async with self._verifier.asking(work.ticket.request_id, work.sources, work.tables) as comparison:
            work.enter("wire")
            if not await read():
                raise LeaseEnded
            work.enter(VERIFY)
            return await comparison.difference()

    def _not_verified(self, load: Load, work: Work, problem: NotCompared) -> None:
        """Note that a read could not be compared. Raises if the load must not go on without that."""
        if work.verification is Verification.MISMATCH:
            why = f"what was read is not what is offered, and then could not be compared: {problem}"
            raise work.failure(load, ChecksumMismatch, why) from problem
        work.verification = Verification.UNVERIFIED
        logger.info("load %s is not verified: %s", load.request_id, problem)
        if load.request.verify:
            if isinstance(problem.__cause__, PeerError):
                raise problem.__cause__ from None
            raise work.failure(load, TransferFailed, f"it cannot be verified: {problem}") from problem
