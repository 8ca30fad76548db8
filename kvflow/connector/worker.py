"""The workers' half of a connector, for any engine: carries out what `connector.scheduler` hands over each step.

An engine's step calls `begin` and `collect`, and neither ever waits: the work runs on the loop of a `blocking.Runtime`
and goes on between the steps. Reports are final. A request is received when no byte can land in its blocks any more,
also if its load has failed or was abandoned; it is sent when its lease has ended and the engine waits for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvflow.blocking import Runtime as BlockingRuntime
from kvflow.connector.paged_groups import PagedGroup
from kvflow.connector.step import Step
from kvflow.connector.transfers import Answered, Happening, Loaded, LoadFailed, OfferEnded, WorkerTransfers
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import TOKENS, PromptMismatch, UsageError
from kvflow.parts import preload

if TYPE_CHECKING:
    from kvflow.connector.prefix_peers import PrefixPeers

__all__ = ["Answered", "ConnectorWorker", "LoadFailed", "Loaded", "OfferEnded", "Results"]

_NOTHING = Step()
_RECALL_S = 60.0  # it takes as long as the hold, and a copy that has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Loads and leases that have ended since the last call of `collect`."""

    received: frozenset[str]
    """Loads that have ended, those that failed included."""
    failed: Mapping[str, LoadFailed]
    sent: frozenset[str]
    found: Mapping[str, tuple[Ticket, ...]]
    """What peers offer to each request that they were asked for, which waits for that; see `Answered.tickets`."""
    happenings: tuple[Happening, ...]
    """All that has happened, in order: for metrics and logs."""

    @property
    def refused(self) -> tuple[tuple[str, PromptMismatch], ...]:
        """Requests whose loads have found another prompt of the same tokens: see `ConnectorScheduler.refuse`."""
        errors = ((request_id, one.error) for request_id, one in self.failed.items())
        return tuple(
            (request_id, error)
            for request_id, error in errors
            if isinstance(error, PromptMismatch) and error.parts != TOKENS
        )


class ConnectorWorker:
    """One rank's worker. Whoever made the runtime closes it.

    Args:
        runtime: the rank's, open.
        peers: engines that prefixes are shared with, and asked for; without it neither is done.
    """

    def __init__(self, runtime: BlockingRuntime, peers: PrefixPeers | None = None) -> None:
        preload("growing", "staging", "verify")  # on the engine's thread, not on the loop
        self._runtime = runtime
        self._transfers = WorkerTransfers(peers)
        self._shared: dict[str, int] = {}
        """Counts that `shared` has told."""

    def introduction(self) -> Ticket:
        """Say who this rank is, for `ConnectorScheduler.introduce`.

        Returns:
            A ticket of nothing.

        Raises:
            RuntimeUnavailable: no cache is registered.
        """
        return self._runtime.introduce()

    def share(self, groups: Sequence[PagedGroup], block_tokens: int) -> None:
        """Let peers read prefixes out of the cache that is registered, as `Step.cached_blocks` tells of it.

        Args:
            groups: those of the cache.
            block_tokens: the engine's block size.

        Raises:
            UsageError: this registration is shared already, or the worker was given no `peers`.
            RuntimeUnavailable: no cache is registered.
        """
        peers = self._transfers.peers
        if peers is None:
            raise UsageError("share: the worker was given no peers (PrefixPeers)")
        from kvflow.connector.paged_prefix_cache import PagedPrefixCache

        cache, self._shared = PagedPrefixCache(groups, block_tokens), {}
        self._runtime.start(lambda _: self._transfers.share(peers, cache)).result(_RECALL_S)

    def meet(self, *, follows: bool) -> None:
        """Begin to connect to the known peers, once a cache is registered; returns at once.

        Args:
            follows: whether KV events are followed as well; one rank of an engine does, the one that asks.
        """
        self._runtime.start(lambda runtime: self._transfers.meet(runtime, follows))

    def shared(self) -> Iterator[str]:
        """Tell the outcomes of peers' questions since the last call.

        Returns:
            A word for each: the name of a field of `SharingStatistics`.
        """
        if self._transfers.sharing is not None:
            now = asdict(self._transfers.sharing.statistics)
            for what in ("found", "missed", "busy", "failed", "reclaimed"):
                yield from [what] * (now[what] - self._shared.get(what, 0))
            self._shared = now

    def prepare(self, step: Step) -> None:
        """End the reads of blocks that a step is about to write, and ask its questions; before it computes anything.

        Returns at once, unless somebody may be reading what the step will write. Leases of prefixes end within a turn
        of the loop. A step that recalls a prompt that flows (`Step.recall`) waits here until no read of it can succeed
        any more: some Limits.seal_hold_s.

        Args:
            step: what `ConnectorScheduler.build_step` has given.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
            TimeoutError: a lease has not ended within 60 s.
        """
        cache = self._transfers.prefix_cache
        read = cache.take(step.reused) if cache is not None and step.reused else []
        if step.recall or read:
            self._runtime.start(lambda _: self._transfers.recall(step, read)).result(_RECALL_S)
        if step.questions:
            self._runtime.start(lambda runtime: self._transfers.ask(runtime, step.questions))

    def begin(self, step: Step, *, ready: DeviceEvent | None = None, after: DeviceEvent | None = None) -> None:
        """Start a step's work, once it has been prepared (`prepare`); returns at once.

        The events are for a device that computes after it was told to.

        Args:
            step: what `ConnectorScheduler.build_step` has given.
            ready: happens once what is saved, and what its cached blocks hold, is there. Without it that is there now.
            after: happens once what is received may be written; recorded before the step's own work.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
        """
        if step.cached_blocks and self._transfers.prefix_cache is not None:
            self._transfers.prefix_cache.add(step.cached_blocks, ready)
        if step != _NOTHING:
            self._runtime.start(lambda runtime: self._transfers.carry_out(runtime, step, ready, after))

    def collect(self) -> Results:
        """Take what has ended meanwhile; returns at once.

        Returns:
            Loads and leases that have ended since the last call, each once.

        Raises:
            BaseException: an error in kvflow itself, from then on with every call.
        """
        if self._transfers.problem is not None:
            raise self._transfers.problem
        told = self._transfers.happened
        happened = tuple(told.popleft() for _ in range(len(told)))
        failed = {entry.request_id: entry for entry in happened if isinstance(entry, LoadFailed)}
        loaded = {entry.request_id for entry in happened if isinstance(entry, Loaded)}
        sent = {entry.request_id for entry in happened if isinstance(entry, OfferEnded) and entry.sent}
        return Results(
            received=frozenset(loaded | failed.keys()),
            failed=failed,
            sent=frozenset(sent),
            found={entry.request_id: entry.tickets for entry in happened if isinstance(entry, Answered)},
            happenings=happened,
        )
