"""The verbs of `kvflow.Runtime` for other threads: each is carried out on the loop, within a bound."""

# mypy: disable-error-code="empty-body"
# A verb's body is the runtime's: `_verb` gives it one.

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Self, TypeVar

from kvflow import checks
from kvflow.blocking.host import LoopHost, dropped
from kvflow.blocking.lease import Lease
from kvflow.blocking.load import Load, QuarantinedBlocks
from kvflow.blocking.pending import Pending, ResultT, Work, bound, tell
from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, KVFlowError, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.memory import BlockCopier
from kvflow.runtime.part import Part
from kvflow.runtime.peers.prewarm import Prewarmed
from kvflow.runtime.producer.lease import Lease as AsyncLease
from kvflow.runtime.producer.lease import ServeRequest
from kvflow.runtime.records import Observer
from kvflow.runtime.registration import DrainReport
from kvflow.runtime.statistics import RuntimeStatistics
from kvflow.runtime.world import World

VerbT = TypeVar("VerbT", bound=Callable[..., Any])


def _ending_s(config: Config) -> float:
    """Seconds that unregistering may take."""
    return config.ending_s + config.limits.goodbye_timeout_s + 2 * config.limits.transport_close_timeout_s


def _closing_s(config: Config) -> float:
    """Seconds that closing may take."""
    return _ending_s(config) + config.drain_timeout_s


def _draining_s(config: Config, deadline_s: float | None = None) -> float:
    """Seconds that draining may take."""
    wanted_s = config.drain_timeout_s if deadline_s is None else deadline_s
    return checks.seconds(wanted_s, "drain: deadline_s", error=UsageError) + _closing_s(config)


def _verb(within: Callable[..., float] = lambda *_, **__: 0.0) -> Callable[[VerbT], VerbT]:
    """Make a verb of `kvflow.Runtime` one of its blocking handle.

    `within` bounds it, by the Config and the verb's arguments.
    """

    def made(shown: VerbT) -> VerbT:
        @wraps(shown)
        def act(self: Runtime, *given: Any, **named: Any) -> object:
            async def work(runtime: asynchronous.Runtime) -> object:
                found = getattr(runtime, shown.__name__)(*given, **named)
                return await found if isinstance(found, Coroutine) else found

            try:
                found = self._host.call(work, within(self.config, *given, **named) + self._host.call_timeout_s)
            except KVFlowError as error:
                self._wrap_quarantine(error)
                raise
            return Lease(found, self._host) if isinstance(found, AsyncLease) else found

        return act  # type: ignore[return-value]

    return made


class Runtime:
    """A `kvflow.Runtime` in a thread of its own. Use it as `with Runtime(config) as rt`, or with `open` and `close`.

    All methods may be called from any thread but the loop's own, where those that wait raise UsageError. Verbs raise
    RuntimeClosed if the runtime is closed, RuntimeBroken if its loop has died. A runtime that is dropped without being
    closed is closed in the background, with a ResourceWarning.

    Args:
        config: settings of the rank.
        observers: are told, on the loop's thread, how every load and lease has ended.
        world: clock, network and the like, for tests.
        parts: capabilities beside the core, as for `kvflow.Runtime`; `start` calls what is theirs.
        call_timeout_s: how long a call waits for the loop's thread, in seconds, beyond the time that what it asks for
            may take. It passes only if that thread is stuck, and then the call raises TimeoutError.

    Raises:
        ConfigError: what was given is not of that kind.
    """

    def __init__(
        self,
        config: Config,
        *,
        observers: Sequence[Observer] = (),
        world: World | None = None,
        parts: Sequence[Part] = (),
        call_timeout_s: float = 10.0,
    ) -> None:
        bound_s = checks.seconds(call_timeout_s, "call_timeout_s", error=ConfigError)
        runtime = asynchronous.Runtime(config, observers=observers, world=world, parts=parts)
        self._host = LoopHost(runtime, bound_s)
        self.config = config
        self._drop = weakref.finalize(self, dropped, self._host)
        self._drop.atexit = False

    def __repr__(self) -> str:
        return f"<blocking {self._host.runtime!r}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Start the thread and the runtime; returns when it is open, however long that takes.

        Raises:
            ConfigError: something that Config asks for cannot be had. The thread has ended then.
            UsageError: it was opened, or closed, before.
        """
        self._host.open(_closing_s(self.config) + self._host.call_timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the runtime (see `kvflow.Runtime.aclose`) and end the thread. Closing twice is fine.

        Args:
            timeout_s: how long to wait, in seconds; what Config allows for closing plus `call_timeout_s` if None.

        Raises:
            RuntimeBroken: reads could not be stopped, or the loop had died.
            TimeoutError: `timeout_s` has passed; the closing goes on.
            UsageError: on the loop's own thread; or `timeout_s` is no time.
        """
        bound_s = bound(timeout_s)
        self._drop.detach()
        self._host.close(_closing_s(self.config) + self._host.call_timeout_s if bound_s is None else bound_s)

    def register_kv_caches(
        self,
        kv_caches: KVCaches | Sequence[CacheGroup],
        layout: CacheLayout | None = None,
        *,
        copy_blocks: BlockCopier | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """Make the cache readable by peers and writable by loads: see `kvflow.Runtime.register_kv_caches`.

        Args:
            kv_caches: a dict of tensors by layer name, or a list of `CacheGroup`s.
            layout: what the tensors of a dict look like; groups have their own.
            copy_blocks: copies between host buffers and the cache.
            timeout_s: how long to wait, in seconds.

        Raises:
            LayoutError, ConfigError, UsageError: as `kvflow.Runtime.register_kv_caches` has it.
            TimeoutError: `timeout_s` has passed; the registration is cancelled, and leaves no cache registered.
        """
        self._host.call(
            lambda runtime: runtime.register_kv_caches(kv_caches, layout, copy_blocks=copy_blocks), timeout_s
        )

    @_verb(_ending_s)
    def unregister(self) -> None:
        """Give the cache back, as before an engine sleeps: see `kvflow.Runtime.unregister`.

        Raises:
            RuntimeBroken, UsageError: as `kvflow.Runtime.unregister` has it.
            TimeoutError: the loop's thread is stuck; the unregistering goes on.
        """

    @_verb()
    def serve_blocks(self, request: ServeRequest) -> Lease:
        """Offer blocks to readers: see `kvflow.Runtime.serve_blocks`. The lease is in force when this returns.

        Args:
            request: the blocks, in prompt order, and what of a prompt they hold.

        Returns:
            The lease's handle; its `wait` gives how it ended.

        Raises:
            RequestError, RuntimeUnavailable: as `kvflow.Runtime.serve_blocks` has it.
        """

    @_verb()
    def introduce(self) -> Ticket:
        """Say who this rank is: see `kvflow.Runtime.introduce`.

        Returns:
            A ticket that offers nothing.

        Raises:
            RuntimeUnavailable: as `kvflow.Runtime.introduce` has it.
        """

    @_verb()
    def decline(
        self,
        request_id: str,
        reason: str = "",
        *,
        at: Ticket | Mapping[str, Any] | None = None,
        instead: Ticket | Mapping[str, Any] | None = None,
    ) -> None:
        """Tell readers that a request will not be served: see `kvflow.Runtime.decline`.

        Args:
            request_id: the one that the rendezvous names.
            reason: what readers are told.
            at: the rendezvous of readers that wait at another engine.
            instead: with `at`, a rendezvous of the same request with this engine.

        Raises:
            RequestError: as `kvflow.Runtime.decline` has it.
        """

    def start_load(self, request: LoadRequest) -> Load:
        """Start to read the blocks that a ticket offers; returns at once.

        Never raises: whatever is wrong is raised by the handle's `result`.

        Args:
            request: the ticket, and the local blocks to fill.

        Returns:
            The load's handle. The blocks may be reused when its `settled()` returns, however it has ended.
        """
        return Load(self._host, request)

    def load_blocks(self, request: LoadRequest) -> LoadReport:
        """Read the blocks that a ticket offers: see `kvflow.Runtime.load_blocks`. Bounded by the request's deadline.

        An interrupt in the calling thread cancels the load, and is raised once it has ended; bytes may still land then:
        who may be interrupted uses `start_load`, whose handle tells.

        Args:
            request: the ticket, and the local blocks to fill.

        Returns:
            What was read, and how long each phase took.

        Raises:
            RequestError, PeerError, LoadError, RuntimeUnavailable, RuntimeBroken: as `kvflow.Runtime.load_blocks` has
                it; a `quarantine` is a `Load` of this module.
            TimeoutError: the loop's thread is stuck; the load is cancelled.
        """
        ids_max = self.config.limits.block_ids_max
        deadline_s = checks.settled_request(request, LoadRequest, "load_blocks", ids_max).deadline_s
        bound_s = self.config.load_deadline_s if deadline_s is None else deadline_s
        load = self.start_load(request)
        after_s = self.config.cancel_grace_s + self._host.call_timeout_s
        try:
            return load.result(bound_s + after_s)
        finally:
            if not load.done:
                load.cancel()
                load.wait_done(after_s)

    @contextlib.contextmanager
    def keep_leases(self, ticket: Ticket | Mapping[str, Any]) -> Iterator[None]:
        """Keep what a ticket offers while a request waits for its load: see `kvflow.Runtime.keep_leases`.

        Args:
            ticket: as it came from the router.

        Returns:
            A context manager; its block is how long the leases are kept. Leaving it never waits.

        Raises:
            RequestError: the ticket cannot be right; on entering the block.
        """
        kept = contextlib.ExitStack()
        self._host.call_at_once(lambda runtime: kept.enter_context(runtime.keep_leases(ticket)))
        try:
            yield
        finally:
            tell(self._host.loop, kept.close)

    @_verb(lambda config, *_, **__: config.lease_lifetime_s + config.handshake_timeout_s)
    def release_blocks(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """Give up what a ticket offers without reading it: see `kvflow.Runtime.release_blocks`.

        Args:
            ticket: as it came from the router.

        Returns:
            True if all ranks were told in time.

        Raises:
            RequestError: the ticket cannot be right.
        """

    def prewarm(
        self, engines: Sequence[PeerAddress | Ticket | Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> tuple[Prewarmed, ...]:
        """Connect to engines before the first load from them: see `kvflow.Runtime.prewarm`.

        Args:
            engines: each named by the address of one of its ranks, or by a ticket of it.
            timeout_s: how long to wait, in seconds; None waits as long as the handshakes take.

        Returns:
            One result for each, in order, with the error if there was one.

        Raises:
            TimeoutError: `timeout_s` has passed; handshakes under way go on.
        """
        return self._host.call(lambda runtime: runtime.prewarm(engines), timeout_s)

    @_verb(lambda config, *_, **__: 2 * config.handshake_timeout_s)
    def forget_peer(self, engine_id: str, address: str | None = None) -> bool:
        """Forget an engine, or one rank of it: see `kvflow.Runtime.forget_peer`.

        Args:
            engine_id: whose ranks.
            address: of one rank; None for all.

        Returns:
            True if it was forgotten within Config.handshake_timeout_s; if not it will be later.

        Raises:
            RequestError: what was given is no text.
        """

    @_verb(_draining_s)
    def drain(self, deadline_s: float | None = None) -> DrainReport:
        """Take no new work, and wait for what is open: see `kvflow.Runtime.drain`.

        Args:
            deadline_s: after how many seconds leases are revoked and loads ended; Config.drain_timeout_s if None.

        Returns:
            What became of what was open when draining began.

        Raises:
            UsageError: `deadline_s` is no time.
        """

    def statistics(self) -> RuntimeStatistics:
        """Counts of what is open now and of what has happened so far. Legal in every state.

        Returns:
            A frozen copy, of the end if the loop has ended.

        Raises:
            TimeoutError: the loop's thread is stuck.
            UsageError: on the loop's own thread.
        """
        if self._host.alive:
            with contextlib.suppress(RuntimeClosed, RuntimeBroken):  # it has ended meanwhile
                return self._host.call_at_once(asynchronous.Runtime.statistics)
        return self._host.runtime.statistics()

    def start(self, work: Work[ResultT]) -> Pending[ResultT]:
        """Run a coroutine of your own on the runtime's loop, such as a part's verb; returns at once.

            saving = rt.start(lambda _: storage.save(request))
            report = saving.result(60)

        Args:
            work: called on the loop with the `kvflow.Runtime` there; the coroutine that it returns must never block.

        Returns:
            A handle to wait for the result, or to cancel.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
            UsageError: it has not been opened.
        """

        async def run(runtime: asynchronous.Runtime) -> ResultT:
            try:
                return await work(runtime)
            except KVFlowError as error:
                self._wrap_quarantine(error)
                raise

        return self._host.start(run)

    def _wrap_quarantine(self, error: KVFlowError) -> None:
        """Have the quarantine of an error be one that threads can wait for."""
        if error.quarantine is not None:
            error.quarantine = QuarantinedBlocks(error.quarantine, self._host)
