"""Handles of a blocking runtime's leases, loads and quarantined blocks, for use on any thread."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from kvflow import checks
from kvflow.blocking.loop_thread import LoopThread, checked_timeout
from kvflow.core.plan.descriptors import GivenBlockIds
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.policy.states import LeaseState
from kvflow.errors import KVFlowError, Quarantine, RuntimeClosed
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.load.load import Load as AsyncLoad
from kvflow.runtime.load.load import request_name
from kvflow.runtime.load.requests import LoadReport, LoadRequest, Progress
from kvflow.runtime.producer.lease import Lease as AsyncLease
from kvflow.runtime.producer.lease import LeaseOutcome


class Lease:
    """A lease of a blocking runtime, for use on any thread. Its methods do what those of `kvflow.Lease` do.

    `advance`, `extend`, `complete` and `fail` return once the event loop has carried them out. They raise TimeoutError
    if the loop's thread is stuck for longer than the runtime's `call_timeout_s`, RuntimeClosed or RuntimeBroken if that
    thread has ended, and UsageError if called on it.
    """

    def __init__(self, lease: AsyncLease, thread: LoopThread) -> None:
        self.request_id, self.ticket = lease.request_id, lease.ticket
        self._lease = lease
        self._thread = thread
        self.outcome: Future[LeaseOutcome] = thread.submit(lambda _: lease.wait())
        """Future of the lease's outcome, done once the blocks may be reused."""

    def __repr__(self) -> str:
        return f"<blocking {self._lease!r}>"

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Current block ids of the lease; of the first group, if there are several."""
        return self._lease.block_ids

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Current block ids of the lease: one tuple for each group."""
        return self._lease.block_tables

    @property
    def state(self) -> LeaseState:
        """State of the lease: OFFERED, or its outcome.

        The blocks may be reused only once `done` is True, a moment after the lease has ended.
        """
        return self._lease.state

    @property
    def done(self) -> bool:
        """True if the blocks may be reused."""
        return self.outcome.done()

    def wait(self, timeout_s: float | None = None) -> LeaseOutcome:
        """Wait until the blocks may be reused.

        Args:
            timeout_s: seconds to wait at most; 0 does not wait, None has no limit.

        Returns:
            The outcome of the lease.

        Raises:
            TimeoutError: `timeout_s` has passed; the lease goes on.
            RuntimeBroken: the loop has died.
            UsageError: called on the loop's own thread before the lease is done, or `timeout_s` is not a valid time.
        """
        return self._thread.result_of(self.outcome, timeout_s)

    def revoke(self) -> Lease:
        """Ask the event loop to end the lease as REVOKED (`kvflow.Lease.revoke`). Never waits.

        Returns:
            This lease; `lease.revoke().wait()` returns the outcome, once the blocks may be reused.
        """
        self._thread.call_soon(self._lease.revoke)
        return self

    def restart(self, ttl_s: float | None = None) -> None:
        """Start the lease's time again, as if the lease were opened now with `ttl_s`. Never waits.

        Args:
            ttl_s: new time to live in seconds; None: Config.lease_ttl_s.

        Raises:
            RequestError: `ttl_s` is not a valid time.
        """
        self._thread.call_soon(self._lease.restart, None if ttl_s is None else checks.seconds(ttl_s, "ttl_s"))

    def advance(self, num_tokens: int, ready: DeviceEvent | None = None) -> None:
        """Blocking form of `kvflow.Lease.advance`: announce that the first `num_tokens` tokens are computed."""
        self._thread.call_now(lambda _: self._lease.advance(num_tokens, ready))

    def extend(self, block_ids: GivenBlockIds) -> None:
        """Blocking form of `kvflow.Lease.extend`: add the next blocks of the prompt to the lease."""
        self._thread.call_now(lambda _: self._lease.extend(block_ids))

    def complete(self, payload: bytes = b"", ready: DeviceEvent | None = None) -> None:
        """Blocking form of `kvflow.Lease.complete`: announce that all tokens are computed.

        The lease's loads get `payload` (`LoadReport.payload`).
        """
        self._thread.call_now(lambda _: self._lease.complete(payload, ready))

    def fail(self, reason: str = "") -> Lease:
        """Blocking form of `kvflow.Lease.fail`: end the lease as FAILED, since its prompt will never be computed."""
        self._thread.call_now(lambda _: self._lease.fail(reason))
        return self


@checks.hides_secrets
class Load:
    """A load of a blocking runtime, for use on any thread. Its methods do what those of `kvflow.Load` do.

    The load's blocks may be reused once `safe` is True, or `settled` has returned. If the load ends with an error while
    bytes may still land, the load is also the `quarantine` of that error.
    """

    def __init__(self, thread: LoopThread, request: LoadRequest) -> None:
        self.request_id = request_name(request)
        self._thread = thread
        self._request = request
        self._load: AsyncLoad | None = None
        self._cancelled = False
        try:
            self._report = thread.submit(self._carry_out)
        except KVFlowError as error:  # `result` raises it
            self._report = Future()
            self._report.set_exception(error)

    def __repr__(self) -> str:
        return f"<blocking {self._load!r}>" if self._load else f"<blocking Load {self.request_id} not begun>"

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Ids of the local blocks that the load fills; empty before the load has begun."""
        return self._load.block_ids if self._load else ()

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """For each group of layers, ids of the local blocks that the load fills; empty before the load has begun."""
        return self._load.block_tables if self._load else ()

    @property
    def done(self) -> bool:
        """True once the load has ended: `result` then returns or raises without waiting."""
        return self._report.done()

    @property
    def safe(self) -> bool:
        """True once the load has ended and no byte can land in its blocks."""
        return self.done and (self._load is None or self._load.safe)

    def result(self, timeout_s: float | None = None) -> LoadReport:
        """Wait in the calling thread until the load has ended, and return its report.

        Args:
            timeout_s: seconds to wait at most; 0 does not wait, None has no limit.

        Returns:
            Report of the tokens and bytes read, and of each phase's time.

        Raises:
            KVFlowError: the load failed; `kvflow.Runtime.load_blocks` lists the errors.
            concurrent.futures.CancelledError: the load was cancelled.
            TimeoutError: `timeout_s` has passed; the load goes on.
            UsageError: called on the loop's own thread before the load is done, or `timeout_s` is not a valid time.
        """
        return self._thread.result_of(self._report, timeout_s)

    def wait_done(self, timeout_s: float | None = None) -> bool:
        """Wait in the calling thread until the load has ended, successfully or not.

        Args:
            timeout_s: seconds to wait at most; 0 does not wait, None has no limit.

        Returns:
            True once the load has ended; False if `timeout_s` has passed.

        Raises:
            UsageError: called on the loop's own thread before the load is done, or `timeout_s` is not a valid time.
        """
        self._thread.require_another_thread(self._report)
        return bool(concurrent.futures.wait([self._report], checked_timeout(timeout_s)).done)

    def cancel(self) -> None:
        """Ask the load to end, within Config.cancel_grace_s. Never waits. Any thread may call this."""
        self._thread.call_soon(self._cancel)

    def extend(self, block_ids: GivenBlockIds, after: DeviceEvent | None = None) -> None:
        """Blocking form of `kvflow.Load.extend`: add the next local blocks to the load."""
        self._thread.call_now(lambda _: None if self._load is None else self._load.extend(block_ids, after))

    def computed(self, tokens: int, timeout_s: float | None = None) -> int | None:
        """Blocking form of `kvflow.Load.computed`: wait until more than `tokens` tokens of the prompt are computed.

        Args:
            tokens: number of computed tokens that the caller knows of; 0 for none.
            timeout_s: seconds to wait at most; None has no limit.

        Returns:
            Number of the prompt's first tokens that are computed; None if the load has ended.

        Raises:
            TimeoutError: `timeout_s` has passed; the load goes on.
            UsageError: called on the loop's own thread, or `timeout_s` is not a valid time.
        """

        async def computed(_: asynchronous.Runtime) -> int | None:
            return None if self._load is None else await self._load.computed(tokens)

        return self._thread.call(computed, timeout_s)

    def add_done_callback(self, callback: Callable[[Load], object]) -> None:
        """Call `callback` with this handle once the load is done.

        Args:
            callback: function that takes this handle. It is called on the loop's thread, which it must not block; if
                the load is already done, at once on the calling thread.
        """
        self._report.add_done_callback(lambda _: callback(self))

    def settled(self, timeout_s: float | None = None) -> None:
        """Wait until the load has ended, successfully or not, and no byte can land in its blocks.

        Args:
            timeout_s: seconds to wait at most; 0 does not wait, None has no limit.

        Raises:
            TimeoutError: `timeout_s` has passed.
            RuntimeBroken: the loop has ended before the load's reads were known to have stopped.
            UsageError: the load is not `safe` yet, and either `timeout_s` is not a valid time or this is the loop's own
                thread.
        """
        self._thread.wait_safe(self, self._settled, timeout_s)

    def __iter__(self) -> Iterator[Progress]:
        """Yield a `Progress` whenever more tokens have landed, until the load ends. Several threads may iterate.

        The iteration raises the errors of `result`, and TimeoutError if the loop's thread is stuck for longer than the
        load may take plus the runtime's `call_timeout_s`.
        """
        tokens = -1
        while (progress := self._step(tokens)) is not None:
            tokens = progress.tokens
            yield progress
        report = self.result()
        if report.tokens > tokens:
            yield Progress(report.tokens, report.tokens)

    def _step(self, tokens: int) -> Progress | None:
        async def progressed(_: asynchronous.Runtime) -> Progress | None:
            if self._load is None:
                return None
            self._load.follow()
            return await self._load.progressed(tokens)

        config = self._thread.runtime.config
        asked_s = checks.try_call(lambda: self._request.deadline_s)
        deadline_s = config.load_deadline_s if asked_s is None else max(checks.deadline(asked_s, "deadline_s"), 0.0)
        try:
            return self._thread.call(progressed, deadline_s + config.cancel_grace_s + self._thread.call_timeout_s)
        except RuntimeClosed:  # the loop has ended: `result` says how the load ended
            return None

    async def _carry_out(self, runtime: asynchronous.Runtime) -> LoadReport:
        self._load = runtime.start_load(self._request)
        if self._cancelled:
            self._load.cancel()
        try:
            return await self._load
        except KVFlowError as error:
            if error.quarantine is not None:
                error.quarantine = self
            raise

    def _cancel(self) -> None:
        self._cancelled = True
        if self._load is not None:
            self._load.cancel()

    async def _settled(self, _: asynchronous.Runtime) -> None:
        if self._load is not None:
            await self._load.settled()


class QuarantinedBlocks:
    """Blocks of a failed restore, in which bytes may still land: the `quarantine` of the restore's error."""

    def __init__(self, held: Quarantine, thread: LoopThread) -> None:
        self.request_id, self.block_ids = held.request_id, held.block_ids
        self._quarantine = held
        self._thread = thread

    @property
    def safe(self) -> bool:
        """True once no byte can land in the blocks."""
        return self._quarantine.safe

    def settled(self, timeout_s: float | None = None) -> None:
        """Wait until no byte can land in the blocks.

        TimeoutError if `timeout_s` has passed; RuntimeBroken if the loop has ended before the reads were known to have
        stopped.
        """
        self._thread.wait_safe(self, self._settled, timeout_s)

    async def _settled(self, _: asynchronous.Runtime) -> None:
        await self._quarantine.settled()
