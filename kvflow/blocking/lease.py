"""A lease on the loop, as other threads hold it."""

# mypy: disable-error-code="empty-body"
# A verb's body is the lease's: `_lease_verb` gives it one.

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from kvflow import checks
from kvflow.blocking.host import LoopHost
from kvflow.blocking.pending import Pending, tell
from kvflow.core.plan.descriptors import GivenBlockIds
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.policy.states import LeaseState
from kvflow.runtime.producer.lease import Lease as AsyncLease
from kvflow.runtime.producer.open_lease import LeaseOutcome

VerbT = TypeVar("VerbT", bound=Callable[..., Any])


def _lease_verb(shown: VerbT) -> VerbT:
    """Make a verb of `kvflow.Lease` one of its blocking handle: it returns once the loop has carried it out."""

    @wraps(shown)
    def act(self: Lease, *given: object, **named: object) -> object:
        found = self._host.call_at_once(lambda _: getattr(self._lease, shown.__name__)(*given, **named))
        return self if isinstance(found, AsyncLease) else found

    return act  # type: ignore[return-value]


class Lease:
    """A lease held on the loop: see `kvflow.Lease`."""

    def __init__(self, lease: AsyncLease, host: LoopHost) -> None:
        self.request_id, self.ticket = lease.request_id, lease.ticket
        self._lease = lease
        self._host = host
        self._loop = host.loop
        self.outcome: Pending[LeaseOutcome] = host.start(lambda _: lease.wait())
        """Outcome of the lease, once the blocks may be reused."""

    def __repr__(self) -> str:
        return f"<blocking {self._lease!r}>"

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Blocks of the lease by now; those of the first group, if there are several."""
        return self._lease.block_ids

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of the lease by now, by group."""
        return self._lease.block_tables

    @property
    def state(self) -> LeaseState:
        """Offered, or how it has ended; its blocks are free a moment later, when it is `done`."""
        return self._lease.state

    @property
    def done(self) -> bool:
        """True if the blocks may be reused."""
        return self.outcome.done

    def wait(self, timeout_s: float | None = None) -> LeaseOutcome:
        """Wait until the blocks may be reused.

        Args:
            timeout_s: how long, in seconds; 0 does not wait, None waits as long as it takes.

        Returns:
            How the lease ended.

        Raises:
            TimeoutError: `timeout_s` has passed; the lease stays as it is.
            RuntimeBroken: the loop has died.
            UsageError: on the loop's own thread, unless it is done; or `timeout_s` is no time.
        """
        return self.outcome.result(timeout_s)

    def revoke(self) -> Lease:
        """Withdraw the offer, some time soon: see `kvflow.Lease.revoke`. May be called on any thread, and never waits.

        Returns:
            The lease; `lease.revoke().wait()` gives how it ended once its blocks may be reused.
        """
        tell(self._loop, self._lease.revoke)
        return self

    @_lease_verb
    def advance(self, num_tokens: int, ready: DeviceEvent | None = None) -> None:
        """Say that the first `num_tokens` tokens are computed: see `kvflow.Lease.advance`.

        Returns when the loop has taken note.

        Args:
            num_tokens: how many, from the first one on.
            ready: an event behind the step that computes them, of the caller's thread.

        Raises:
            RequestError: as `kvflow.Lease.advance` has it.
            RuntimeClosed: the loop has been closed; RuntimeBroken if it has died.
            TimeoutError: the loop's thread is stuck, for longer than the runtime's `call_timeout_s`; whether it has
                taken note is not known.
            UsageError: on the loop's own thread.
        """

    @_lease_verb
    def fail(self, reason: str = "") -> Lease:
        """End the lease as failed, since its prompt will never be computed: see `kvflow.Lease.fail`.

        Returns when the loop has taken note.

        Args:
            reason: for logs, records and readers' errors.

        Returns:
            The lease; `wait` tells when its blocks may be reused.

        Raises:
            RequestError: `reason` is no text.
            RuntimeClosed, RuntimeBroken, TimeoutError, UsageError: as for `advance`.
        """

    @_lease_verb
    def extend(self, block_ids: GivenBlockIds) -> None:
        """Add the blocks that follow: see `kvflow.Lease.extend`. Returns when the loop has taken note.

        Args:
            block_ids: the further blocks only, in prompt order, given as in `ServeRequest.block_ids`.

        Raises:
            RequestError, BlocksBusy: as `kvflow.Lease.extend` has it.
            RuntimeClosed, RuntimeBroken, TimeoutError, UsageError: as for `advance`.
        """

    @_lease_verb
    def complete(self, payload: bytes = b"", ready: DeviceEvent | None = None) -> None:
        """Say that all tokens are computed: see `kvflow.Lease.complete`. Returns when the loop has taken note.

        Args:
            payload: goes to every load of the lease, at most 4 KiB.
            ready: see `advance`.

        Raises:
            RequestError: as `kvflow.Lease.complete` has it.
            RuntimeClosed, RuntimeBroken, TimeoutError, UsageError: as for `advance`.
        """

    def restart(self, ttl_s: float | None = None) -> None:
        """Count its time from now on: see `kvflow.Lease.restart`. May be called on any thread, and never waits.

        Args:
            ttl_s: in seconds; Config.lease_ttl_s if None.

        Raises:
            RequestError: `ttl_s` is no time.
        """
        tell(self._loop, self._lease.restart, None if ttl_s is None else checks.seconds(ttl_s, "ttl_s"))
