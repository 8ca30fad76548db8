"""What a load waits for before it is read: an event of the device; and connections that stay open meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvflow.checks import said
from kvflow.core.policy.events import DeviceEvent
from kvflow.errors import TransferFailed
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.load.load import Load, Work
from kvflow.runtime.peers.peer import Source


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
