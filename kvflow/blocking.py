"""kvflow for engines that are not asyncio programs: the same verbs, called from any thread.

`Runtime` is the handle of a thread with an event loop of its own, and on it a `kvflow.Runtime`. Every verb comes in two
forms: one that blocks and has a bound, and one that starts the work and returns at once (`start_load`, `start`). The
bound is the `timeout_s` of the call, where None is as long as it takes; without one, the time that Config and the
request allow for what is asked, and `call_timeout_s` of the Runtime for the loop's thread. `Runtime.open` alone has
none, as opening a `kvflow.Runtime` has none.

Progress depends on no thread of the engine. What it refuses: leaving anything behind. Closing, dropping the handle, or
the death of the loop settles whoever waits, and the thread ends.
"""

# mypy: disable-error-code="empty-body"
# A verb's body is the runtime's: `_verb` and `_lease_verb` give it one.

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

import uvloop

from kvflow import checks
from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.descriptors import GivenBlockIds
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.policy.states import LeaseState
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, KVFlowError, Quarantine, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.logs import logger_of
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.drain import DrainReport
from kvflow.runtime.foreign import Foreign
from kvflow.runtime.load.load import Load as AsyncLoad
from kvflow.runtime.load.load import (
    LoadReport,
    LoadRequest,
    Progress,
    checked_load_request,
    refused_load,
    request_name,
)
from kvflow.runtime.memory.host_buffers import BlockCopier
from kvflow.runtime.peers.prewarm import Prewarmed
from kvflow.runtime.prefix.requests import PrefixOffer, PrefixReport, PrefixRequest
from kvflow.runtime.prefix.sharing import SharedPrefixes
from kvflow.runtime.prefix.shelf import Shelf
from kvflow.runtime.producer.lease import Lease as AsyncLease
from kvflow.runtime.producer.lease import ServeRequest
from kvflow.runtime.producer.open_lease import LeaseOutcome
from kvflow.runtime.records import Observer
from kvflow.runtime.statistics import RuntimeStatistics
from kvflow.runtime.store.requests import RestoreReport, RestoreRequest, SaveReport, SaveRequest
from kvflow.runtime.world import World

__all__ = ["Lease", "Load", "Pending", "Runtime"]

logger = logger_of(__name__)

ResultT = TypeVar("ResultT")
VerbT = TypeVar("VerbT", bound=Callable[..., Any])
Work: TypeAlias = Callable[[asynchronous.Runtime], Coroutine[Any, Any, ResultT]]
_WAITS_FOR_ITSELF = "called on the loop's own thread, which would wait for itself"


class Pending(Generic[ResultT]):
    """Handle of work that is under way on the runtime's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._future: concurrent.futures.Future[ResultT] = concurrent.futures.Future()

    @property
    def done(self) -> bool:
        """True if `result` returns, or raises, at once."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> ResultT:
        """Wait, in the calling thread, for what comes of the work.

        Args:
            timeout_s: how long, in seconds; 0 does not wait, None waits as long as it takes.

        Returns:
            What the work returned.

        Raises:
            BaseException: what the work raised.
            concurrent.futures.CancelledError: it was cancelled.
            TimeoutError: `timeout_s` has passed; the work goes on.
            UsageError: on the loop's own thread, unless it is done; or `timeout_s` is no time.
        """
        self._require_another_thread()
        return self._future.result(_bound(timeout_s))

    def cancel(self) -> None:
        """Ask the work to end. It has ended when `done` says so."""
        _tell(self._loop, self._cancel)

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Have a function called once the work is done.

        Args:
            callback: gets this handle, on the loop's thread, which it must not block; or here and now if it is done.
        """
        self._future.add_done_callback(lambda _: callback(self))

    def wait_done(self, timeout_s: float | None = None) -> bool:
        """Wait, in the calling thread, until it is done, in whatever way.

        Args:
            timeout_s: how long, as for `result`.

        Returns:
            Whether it is done; False if `timeout_s` has passed.

        Raises:
            UsageError: as for `result`.
        """
        self._require_another_thread()
        return bool(concurrent.futures.wait([self._future], _bound(timeout_s)).done)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> None:
        """Start the task, on the loop."""
        if self._cancelled:
            self._fail(concurrent.futures.CancelledError())
        else:
            self._task = self._loop.create_task(self._run(work), name="kvflow-blocking")

    def _fail(self, error: BaseException) -> None:
        """End it, unless it has ended."""
        if not self._future.done():
            self._future.set_exception(error)

    def _require_another_thread(self) -> None:
        if asyncio._get_running_loop() is self._loop and not self.done:
            raise UsageError(_WAITS_FOR_ITSELF)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> None:
        """The task: whatever comes of the work, who waits in another thread gets it."""
        try:
            self._future.set_result(await work())
        except asyncio.CancelledError:
            asked = self._cancelled
            self._fail(concurrent.futures.CancelledError() if asked else RuntimeClosed("the runtime was closed"))
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to who waits
            self._fail(error)


class Load(Pending[LoadReport]):
    """A load on the loop: see `kvflow.Load`. Also the `quarantine` of the error that it ended with.

    `result` raises what `kvflow.Runtime.load_blocks` raises. Cancelled, it is `done` within Config.cancel_grace_s. Its
    blocks may be reused when `safe` says so, or `settled` has returned.
    """

    def __init__(self, host: _Host, request: LoadRequest) -> None:
        super().__init__(host.loop)
        self.request_id = request_name(request)
        self._host = host
        self._request = request
        self._load: AsyncLoad | None = None
        try:
            host.begin(self, self._carry_out)
        except KVFlowError as error:  # it is raised by `result`
            self._load = refused_load(request, error)
            self._fail(error)

    def __repr__(self) -> str:
        return f"<blocking {self._load!r}>" if self._load else f"<blocking Load {self.request_id} not begun>"

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The local blocks that it fills; none before it has begun."""
        return self._load.block_ids if self._load else ()

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """The local blocks, by group of layers."""
        return self._load.block_tables if self._load else ()

    @property
    def safe(self) -> bool:
        """True if it has ended and no byte can land in its blocks any more."""
        return self.done and (self._load is None or self._load.safe)

    def __iter__(self) -> Iterator[Progress]:
        """Its progress, as of `kvflow.Load`: whenever more tokens have landed, until it has ended.

        Raises what `result` raises; TimeoutError if the loop's thread is stuck, for longer than the load may take and
        the runtime's `call_timeout_s`. Each step waits for the loop; other threads may wait for the same load.
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

        try:
            return self._host.call(progressed, _loading_s(self._host.config, self._request) + self._host.call_timeout_s)
        except RuntimeClosed:  # the loop has ended: `result` says how the load has
            return None

    def settled(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended and no byte can land in its blocks any more, however it ended.

        Args:
            timeout_s: how long, as for `result`.

        Raises:
            TimeoutError: `timeout_s` has passed.
            RuntimeBroken: that can never be known.
            UsageError: as for `result`, unless it is `safe`.
        """
        if not self.safe:
            self._host.settle(self, self._settle, timeout_s)

    async def _carry_out(self, runtime: asynchronous.Runtime) -> LoadReport:
        self._load = runtime.start_load(self._request)
        try:
            return await self._load
        except KVFlowError as error:
            if error.quarantine is not None:
                error.quarantine = self
            raise

    async def _settle(self, _: asynchronous.Runtime) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._load is not None:
            await self._load.settled()


class QuarantinedBlocks:
    """Blocks of a restore in which bytes may still land: the `quarantine` of the error that it ended with."""

    def __init__(self, held: Quarantine, host: _Host) -> None:
        self.request_id, self.block_ids = held.request_id, held.block_ids
        self._held = held
        self._host = host

    @property
    def safe(self) -> bool:
        """True if no byte can land any more."""
        return self._held.safe

    def settled(self, timeout_s: float | None = None) -> None:
        """Wait until no byte can land any more.

        TimeoutError after `timeout_s`. RuntimeBroken if that can never be known.
        """
        if not self.safe:
            self._host.settle(self, self._settle, timeout_s)

    async def _settle(self, _: asynchronous.Runtime) -> None:
        await self._held.settled()


def _lease_verb(shown: VerbT) -> VerbT:
    """A verb of `kvflow.Lease` that the loop has carried out when this returns; a Lease it returns is the handle."""

    @wraps(shown)
    def act(self: Lease, *given: object, **named: object) -> object:
        async def work(_: asynchronous.Runtime) -> object:
            return getattr(self._lease, shown.__name__)(*given, **named)

        found = self._host.call(work, self._host.call_timeout_s)
        return self if isinstance(found, AsyncLease) else found

    return act  # type: ignore[return-value]


class Lease:
    """A lease held on the loop: see `kvflow.Lease`."""

    def __init__(self, lease: AsyncLease, host: _Host) -> None:
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
        """Its blocks by now; those of the first group, if there are several."""
        return self._lease.block_ids

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Its blocks by now, by group."""
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
        _tell(self._loop, self._lease.revoke)
        return self

    @_lease_verb
    def advance(self, num_tokens: int, ready: DeviceEvent | None = None) -> None:
        """So many tokens are computed: see `kvflow.Lease.advance`.

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
        """The prompt will never be computed: see `kvflow.Lease.fail`. Returns when the loop has taken note.

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
        """These blocks follow: see `kvflow.Lease.extend`. Returns when the loop has taken note.

        Args:
            block_ids: the further blocks only, in prompt order, given as in `ServeRequest.block_ids`.

        Raises:
            RequestError, BlocksBusy: as `kvflow.Lease.extend` has it.
            RuntimeClosed, RuntimeBroken, TimeoutError, UsageError: as for `advance`.
        """

    @_lease_verb
    def complete(self, payload: bytes = b"", ready: DeviceEvent | None = None) -> None:
        """All tokens are computed: see `kvflow.Lease.complete`. Returns when the loop has taken note.

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
        _tell(self._loop, self._lease.restart, None if ttl_s is None else checks.seconds(ttl_s, "ttl_s"))


# --- how long the loop may take for a verb, beyond `call_timeout_s`


def _loading_s(config: Config, request: LoadRequest | SaveRequest | RestoreRequest | PrefixRequest) -> float:
    asked_s = checks.answer(lambda: request.deadline_s)
    deadline_s = config.load_deadline_s if asked_s is None else checks.seconds(asked_s, "deadline_s")
    return deadline_s + config.cancel_grace_s


def _storing_s(config: Config, request: SaveRequest | RestoreRequest | PrefixRequest) -> float:
    return _loading_s(config, request) + config.cancel_grace_s


def _ending_s(config: Config) -> float:
    return config.ending_s + config.limits.goodbye_timeout_s + 2 * config.limits.transport_close_timeout_s


def _closing_s(config: Config) -> float:
    return _ending_s(config) + config.drain_timeout_s


def _draining_s(config: Config, deadline_s: float | None = None) -> float:
    wanted_s = config.drain_timeout_s if deadline_s is None else deadline_s
    return checks.seconds(wanted_s, "drain: deadline_s", error=UsageError) + _closing_s(config)


def _verb(within: Callable[..., float] = lambda *_, **__: 0.0) -> Callable[[VerbT], VerbT]:
    """A verb of `kvflow.Runtime`, on the loop; `within` bounds it, by the Config and the verb's arguments."""

    def made(shown: VerbT) -> VerbT:
        @wraps(shown)
        def act(self: Runtime, *given: Any, **named: Any) -> object:
            async def work(runtime: asynchronous.Runtime) -> object:
                found = getattr(runtime, shown.__name__)(*given, **named)
                return await found if isinstance(found, Coroutine) else found

            try:
                found = self._host.call(work, within(self.config, *given, **named) + self._host.call_timeout_s)
            except KVFlowError as error:
                if error.quarantine is not None:
                    error.quarantine = QuarantinedBlocks(error.quarantine, self._host)
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
        foreign: engines of another make, as for `kvflow.Runtime`.
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
        foreign: Foreign | None = None,
        call_timeout_s: float = 10.0,
    ) -> None:
        bound_s = checks.seconds(call_timeout_s, "call_timeout_s", error=ConfigError)
        self._host = _Host(asynchronous.Runtime(config, observers=observers, world=world, foreign=foreign), bound_s)
        self.config = config
        self._shared: SharedPrefixes | None = None
        self._drop = weakref.finalize(self, _dropped, self._host)
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
        bound_s = _bound(timeout_s)
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
    def decline(self, request_id: str, reason: str = "") -> None:
        """Tell readers that a request will not be served: see `kvflow.Runtime.decline`.

        Args:
            request_id: the one that the rendezvous names.
            reason: what readers are told.

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
        deadline_s = checked_load_request(request, self.config.limits.block_ids_max).deadline_s
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
            _tell(self._host.loop, kept.close)

    @_verb(lambda config, *_, **__: config.lease_lifetime_s + config.handshake_timeout_s)
    def release_blocks(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """Give up what a ticket offers without reading it: see `kvflow.Runtime.release_blocks`.

        Args:
            ticket: as it came from the router.

        Returns:
            Whether all ranks were told in time.

        Raises:
            RequestError: the ticket cannot be right.
        """

    def share(self, shelf: Shelf, *, pinned_blocks_max: int | None = None) -> None:
        """Answer peers that look for a prefix: see `kvflow.Runtime.share`.

        Args:
            shelf: the prefix cache. It is asked on the loop's thread, which it must not block, while the engine's own
                threads may change it.
            pinned_blocks_max: blocks that may be pinned for readers at once; a quarter of the cache if None.

        Raises:
            UsageError, RuntimeUnavailable: as `kvflow.Runtime.share` has it.
        """
        self._shared = self._host.call_at_once(
            lambda runtime: runtime.share(shelf, pinned_blocks_max=pinned_blocks_max)
        )

    def reclaim(self, blocks: int) -> int:
        """Take pinned blocks of what is shared back at once: see `kvflow.SharedPrefixes.reclaim`.

        Args:
            blocks: how many.

        Returns:
            How many are free that were pinned.

        Raises:
            RequestError: it is no number.
            UsageError: nothing was shared.
        """
        return self._host.call_at_once(lambda _: self._require_shared().reclaim(blocks))

    def unshare(self) -> None:
        """Share no more: see `kvflow.SharedPrefixes.close`.

        Raises:
            UsageError: nothing was shared.
        """
        self._host.call_at_once(lambda _: self._require_shared().close())

    @_verb(_storing_s)
    def seek_prefix(self, request: PrefixRequest) -> tuple[PrefixOffer, ...]:
        """Ask peers for a prefix, and read nothing: see `kvflow.Runtime.seek_prefix`.

        Args:
            request: whom to ask, and for what.

        Returns:
            What is offered, the longest first.

        Raises:
            RequestError, RuntimeUnavailable: as `kvflow.Runtime.seek_prefix` has it.
        """

    @_verb(_storing_s)
    def pull_prefix(self, request: PrefixRequest) -> PrefixReport:
        """Fill blocks with as much of a prefix as some peer has: see `kvflow.Runtime.pull_prefix`.

        An interrupt in the calling thread cancels it; bytes may still land then, as in `quarantines` of the runtime.

        Args:
            request: the prompt's keys, the local blocks, and whom to ask.

        Returns:
            How many tokens are there now, and from whom.

        Raises:
            RequestError, PeerError, LoadError, RuntimeUnavailable, RuntimeBroken: as `kvflow.Runtime.pull_prefix` has
                it.
        """

    @_verb(_storing_s)
    def save_blocks(self, request: SaveRequest) -> SaveReport:
        """Save blocks to a file: see `kvflow.Runtime.save_blocks`. Bounded by the request's deadline.

        An interrupt in the calling thread cancels it.

        Args:
            request: the blocks, and the key to find them by.

        Returns:
            How much was saved, and how long it took.

        Raises:
            RequestError, StoreFull, StorageFailed, UsageError: as `kvflow.Runtime.save_blocks` has it.
            DeadlineExceeded, Overloaded, RuntimeUnavailable, RuntimeBroken: as for loads.
        """

    @_verb(_storing_s)
    def restore_blocks(self, request: RestoreRequest) -> RestoreReport:
        """Fill blocks with what was saved: see `kvflow.Runtime.restore_blocks`. Bounded by the request's deadline.

        An interrupt in the calling thread cancels it; bytes may still land then, as in `quarantines` of the runtime.

        Args:
            request: the key, and the local blocks to fill.

        Returns:
            How much was restored, and how long it took.

        Raises:
            NotStored, EntryDamaged, StorageFailed, RequestError, UsageError: as `kvflow.Runtime.restore_blocks` has it.
                The `quarantine` of an error can be waited for in any thread but the loop's.
            DeadlineExceeded, Overloaded, RuntimeUnavailable, RuntimeBroken: as for loads.
        """

    @_verb()
    def is_stored(self, key: bytes | str) -> bool:
        """True if there is an entry under a key: see `kvflow.Runtime.is_stored`.

        Args:
            key: as it was given to `save_blocks`.

        Returns:
            False also for an entry of a cache with another layout.

        Raises:
            RequestError: it cannot be a key.
            UsageError: Config names no store.
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
            Whether it was forgotten within Config.handshake_timeout_s; if not it will be later.

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

    def _require_shared(self) -> SharedPrefixes:
        if self._shared is None:
            raise UsageError("nothing was shared: call `share` first")
        return self._shared

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
        """Run a coroutine of your own on the runtime's loop; returns at once.

        Args:
            work: called on the loop with the `kvflow.Runtime` there; the coroutine that it returns must never block.

        Returns:
            A handle to wait for the result, or to cancel.

        Raises:
            RuntimeClosed: the runtime is closed; RuntimeBroken if its loop has died.
            UsageError: it has not been opened.
        """
        return self._host.start(work)


class _Host:
    """The thread, its loop and the runtime on it. It does not refer to its handle, whose loss it has to notice."""

    def __init__(self, runtime: asynchronous.Runtime, call_timeout_s: float) -> None:
        self.runtime = runtime
        self.config = runtime.config
        self.call_timeout_s = call_timeout_s
        """Seconds that calls wait for the thread, beyond the time that what they ask for may take."""
        self.loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, name=f"kvflow-loop {runtime.config.engine_id}", daemon=True)
        # Callers add to `_pending` in their threads, the end of the loop empties it for good: hence the lock.
        self._lock = threading.Lock()
        self._pending: set[Pending[Any]] = set()
        self._ended = False
        self._cause: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def begun(self) -> bool:
        return self._thread.ident is not None

    def open(self, closing_s: float) -> None:
        """See `Runtime.open`; `closing_s` bounds closing at the interpreter's end."""
        if self.begun or self._ended:
            raise UsageError(f"a Runtime is opened once; this one is {self.runtime.state}")
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self._thread.join()
            raise
        # A NIXL agent must not be destroyed by the interpreter's end while it reads.
        atexit.register(self.close, closing_s)

    def stop(self) -> None:
        """Have the runtime closed and the thread end, some time soon."""
        atexit.unregister(self.close)
        if self.begun:
            _tell(self.loop, self._stop.set)
        else:
            self._end(None)
            self.loop.close()

    def close(self, timeout_s: float) -> None:
        """See `Runtime.close`."""
        if not self.begun:
            self.stop()
            return
        self._require_another_thread()
        _tell(self.loop, self._stop.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.runtime!r} has not closed within {timeout_s} s")
        atexit.unregister(self.close)
        if self._cause is not None:
            error, self._cause = self._closed_error(), None
            raise error

    def start(self, work: Work[ResultT]) -> Pending[ResultT]:
        """See `Runtime.start`."""
        pending: Pending[ResultT] = Pending(self.loop)
        self.begin(pending, work)
        return pending

    def begin(self, pending: Pending[ResultT], work: Work[ResultT]) -> None:
        """Have `pending` run a coroutine on the loop, soon."""
        with self._lock:
            if self._ended:
                raise self._closed_error()
            if not self.begun:
                raise UsageError("the runtime is not open yet: use it as `with Runtime(config) as rt`")
            self._pending.add(pending)
        pending.add_done_callback(self._forget)
        _tell(self.loop, pending._begin, lambda: work(self.runtime))

    def call_at_once(self, verb: Callable[[asynchronous.Runtime], ResultT]) -> ResultT:
        """Call a verb that waits for nothing, on the loop."""

        async def work(runtime: asynchronous.Runtime) -> ResultT:
            return verb(runtime)

        return self.call(work, self.call_timeout_s)

    def call(self, work: Work[ResultT], timeout_s: float | None) -> ResultT:
        """Run a coroutine on the loop and wait for it, up to `timeout_s`; then it is cancelled."""
        self._require_another_thread()
        bound_s = _bound(timeout_s)
        pending = self.start(work)
        try:
            return pending.result(bound_s)
        finally:
            pending.cancel()  # no effect on what is done

    def settle(self, held: Load | QuarantinedBlocks, work: Work[None], timeout_s: float | None) -> None:
        """See `Load.settled`."""
        try:
            self.call(work, timeout_s)
        except RuntimeClosed:  # the loop has ended meanwhile, in good order or not
            if not held.safe:
                raise RuntimeBroken(f"request {held.request_id!r}: its reads were not seen to stop") from None

    def _serve(self) -> None:
        """The thread: runs the loop until the runtime is closed, or until the loop dies."""
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._main())
        except BaseException as cause:  # noqa: BLE001 - whatever killed the loop, everybody gets to know
            self._end(cause if self._opened.done() else None)
            if not self._opened.done():
                self._opened.set_exception(cause)
        else:
            self._end(None)

    async def _main(self) -> None:
        async with self.runtime:
            self._opened.set_result(None)
            await self._stop.wait()

    def _end(self, cause: BaseException | None) -> None:
        """End: nothing runs on the loop any more, so settle everybody, and let nobody in."""
        with self._lock:
            self._ended = True
            self._cause = cause
            left, self._pending = self._pending, set()
        if cause is not None:
            logger.error("the loop of %s died", self.runtime.config.engine_id, exc_info=cause)
        for pending in left:
            pending._fail(self._closed_error())

    def _forget(self, pending: Pending[Any]) -> None:
        with self._lock:
            self._pending.discard(pending)

    def _closed_error(self) -> KVFlowError:
        if self._cause is None:
            return RuntimeClosed(f"{self.runtime!r} is closed")
        error = RuntimeBroken(f"the loop of {self.runtime.config.engine_id!r} died: {self._cause}")
        error.__cause__ = self._cause
        return error

    def _require_another_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError(_WAITS_FOR_ITSELF)


def _dropped(host: _Host) -> None:
    """The handle of a runtime is gone, and nobody has closed it."""
    if host.alive:
        warnings.warn(f"{host.runtime!r} was dropped without being closed", ResourceWarning, stacklevel=2)
    host.stop()


def _bound(timeout_s: float | None) -> float | None:
    """A timeout that threads can wait for; UsageError for anything else."""
    return checks.timeout(timeout_s, "timeout_s", error=UsageError)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Have the loop call something soon. If it has been closed everybody was settled, and there is nobody to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
