"""The Runtime, which users hold. It checks that a call may be made, and passes it on to the part that does the work.

It belongs to the event loop that opened it: every verb is called there, by its thread, or raises UsageError.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

from kvflow import checks
from kvflow.config import Config
from kvflow.core.bounds import REASON_CHARS_MAX
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, KVFlowError, RequestError, RuntimeUnavailable, UsageError
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.load.load import Load, refused_load
from kvflow.runtime.load.loader import Loader
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.memory import BlockCopier
from kvflow.runtime.part import Part
from kvflow.runtime.peers.prewarm import prewarm
from kvflow.runtime.producer.lease import Lease, ServeRequest
from kvflow.runtime.records import Observer, Observers
from kvflow.runtime.statistics import RuntimeState, RuntimeStatistics
from kvflow.runtime.supervisor import Supervisor
from kvflow.runtime.tasks import require_loop, seen
from kvflow.runtime.world import World

_RUNNING = (RuntimeState.OPEN, RuntimeState.DRAINING)


class Runtime:
    """Moves KV blocks for one rank of an engine. Use it as `async with Runtime(config) as rt`.

    A runtime that is dropped without being closed is closed in the background, with a ResourceWarning.

    Args:
        config: settings of the rank.
        observers: are told how every load and lease has ended.
        world: clock, network and the like, for tests.
        parts: capabilities beside the core, such as `kvflow.prefix.Prefixes` or `kvflow.storage.Storage`, in the order
            in which they begin and end.

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
    ) -> None:
        checks.instance(config, Config, "config", error=ConfigError)
        world = World() if world is None else checks.instance(world, World, "world", error=ConfigError)
        self._observers = Observers(observers, forgiven=world.forgives)
        self._supervisor = Supervisor(config, self._observers, world, _checked(parts))
        self._drop = weakref.finalize(self, _dropped, self._supervisor)
        self._drop.atexit = False
        if not world.real:
            self._drop.detach()

    def __repr__(self) -> str:
        return f"<kvflow.Runtime {self.config.engine_id} {self.state}>"

    @property
    def config(self) -> Config:
        return self._supervisor.config

    @property
    def state(self) -> RuntimeState:
        return self._supervisor.state

    @property
    def address(self) -> str:
        """The side channel's address as tickets name it."""
        self._supervisor.require_running()
        return self._supervisor.address

    @property
    def quarantines(self) -> tuple[Load, ...]:
        """Loads that have ended and in whose blocks bytes may still land: await their `settled()`."""
        cache = self._supervisor.held
        return cache.loader.quarantines if cache else ()

    async def __aenter__(self) -> Self:
        """Start the transport, the listener and the poller. Raises ConfigError if one cannot be had.

        Cancelling leaves it closed.
        """
        try:
            await self._supervisor.open()
        finally:
            if self.state is RuntimeState.CLOSED:  # there is nothing to forget
                self._drop.detach()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close in order: no new work, let loads and leases finish, revoke what is left, deregister, stop everything.

        Bounded by Config.drain_timeout_s and transport_close_timeout_s. Closing twice is fine, and so is closing after
        the runtime's own loop was closed, from any other. In a forked child it only forgets the parent's runtime.
        Cancelling it stops the waiting; the closing goes on.

        Raises:
            RuntimeBroken: reads, or a copy, could not be stopped: the registered memory must stay until the process
                ends.
            UsageError: called on another loop than its own.
        """
        loop = self._supervisor.loop
        if self._supervisor.inherited and loop is not None:
            self._drop.detach()
            await self._supervisor.aclose()
        elif loop is not None and loop.is_closed():
            self._drop.detach()
            self._supervisor.abandon(self.config.limits.transport_close_timeout_s)
        else:
            if loop is not None:
                require_loop(loop, "aclose()")
            self._drop.detach()
            await self._supervisor.aclose()
            self._observers.close()

    async def register_kv_caches(
        self,
        kv_caches: KVCaches | Sequence[CacheGroup],
        layout: CacheLayout | None = None,
        *,
        copy_blocks: BlockCopier | None = None,
    ) -> None:
        """Make the cache readable by peers and writable by loads. A runtime has one at a time: see `unregister`.

        After `unregister` it waits until that is over. The tensors stay referenced until they are unregistered or the
        runtime is closed. Where the transport cannot reach the cache's device, or with Config.staging "always", blocks
        go through host buffers. Cancelling leaves the runtime unregistered.

        Args:
            kv_caches: a dict of tensors by layer name, where all layers share a block table; else a list of
                `CacheGroup`s, such as for layers with a sliding window.
            layout: what the tensors of a dict look like; groups have their own.
            copy_blocks: copies between host buffers and the cache. Without it kvflow copies itself, which needs
                tensors that torch can index.

        Raises:
            LayoutError: the tensors are not as their layout says, or groups do not go together.
            ConfigError: the transport cannot reach their device.
            UsageError: a cache is registered already.
        """
        self._require("register_kv_caches", new_work=True)
        await self._supervisor.register(kv_caches, layout, copy_blocks)

    async def unregister(self) -> None:
        """Give the cache back, as before an engine sleeps: once this has returned, no byte of it is read or written.

        From the first moment every lease is revoked, loads end with CacheUnregistered, as do later calls, and peers
        that ask are told to come again. Then reads and copies under way are waited for, readers are told, and the
        memory is deregistered. `register_kv_caches` takes the next cache, of any layout: it is served as another
        incarnation of this rank, and no ticket, seal or connection of before is good for it.

        Bounded by Config.cancel_grace_s, drain_timeout_s, Limits.seal_hold_s, goodbye_timeout_s and twice
        transport_close_timeout_s. Without a cache it returns at once; who calls it meanwhile waits, too. Cancelling
        stops the waiting; the unregistering goes on, and the cache may be freed when another call has returned.

        Raises:
            RuntimeBroken: reads, or a copy, could not be stopped; the memory must stay until the runtime is closed.
            UsageError: a cache is being registered.
        """
        self._require("unregister", new_work=False)
        await self._supervisor.unregister()

    def serve_blocks(self, request: ServeRequest) -> Lease:
        """Offer blocks to readers; the lease is in force when this returns.

        Args:
            request: the blocks, in prompt order, and what of a prompt they hold.

        Returns:
            The lease. Its ticket goes to the consumer, and awaiting it gives its outcome.

        Raises:
            RequestError: it cannot be right; BlocksBusy if a block is being loaded, HostBlocksBusy if too few host
                blocks are free (Config.host_buffer_bytes_max).
            RuntimeUnavailable: the runtime drains, is closed, or has no cache just now.
        """
        return self._require_cache("serve_blocks").serving.serve(request)

    def introduce(self) -> Ticket:
        """Say who this rank is: make a ticket that offers nothing, and opens no lease.

        A router, or a scheduler, makes tickets for requests of it: `Ticket.rendezvous`, `Ticket.without_leases`. An
        engine of several ranks merges its ranks' (`merge_tickets`). It holds until the cache is registered again.

        Returns:
            The ticket.

        Raises:
            RuntimeUnavailable: the runtime drains, is closed, or has no cache just now.
        """
        return self._require_cache("introduce").serving.introduce()

    def decline(
        self,
        request_id: str,
        reason: str = "",
        *,
        at: Ticket | Mapping[str, Any] | None = None,
        instead: Ticket | Mapping[str, Any] | None = None,
    ) -> None:
        """Say that a request will not be served, such as one that was rejected or has failed before it was served.

        Readers that wait for its offer with a rendezvous (`Ticket.rendezvous`) get PrefillFailed with the reason at
        once, and so do those who come later, for a while. A later `serve_blocks` of the same id takes it back. Legal
        while the runtime drains. An engine of several ranks declines on each.

        A router may have sent the request here while its readers wait at another engine. Then say so `at` that engine:
        its ranks are told in the background, by one rank of this engine, and nothing is declined here.

        Args:
            request_id: the one that the rendezvous names.
            reason: what readers are told.
            at: the rendezvous of readers that wait at another engine.
            instead: with `at`, a rendezvous of the same request with this engine: readers go on there.

        Raises:
            RequestError: it is being served, or what was given is no request id, text or rendezvous of that request.
        """
        cache = self._require_cache("decline", new_work=False)
        wanted = checks.request_id(request_id)
        what = f"request {wanted!r}: decline"
        why = checks.text(reason, f"{what}: reason")
        if at is None:
            cache.serving.decline(wanted, why)
            return
        places = [cache.own_reach.read_ticket(one) for one in (at, instead) if one is not None]
        for ticket in places:
            if not ticket.awaited or ticket.request_id != wanted:
                raise RequestError(f"{what}: expected a rendezvous of it, got a ticket of {ticket.request_id[:80]!r}")
        rendezvous = cache.part("growing", what).rendezvous
        rendezvous.send_on(places[0], why[:REASON_CHARS_MAX], places[1] if instead is not None else None)

    async def load_blocks(self, request: LoadRequest) -> LoadReport:
        """Read the blocks that a ticket offers into local blocks; the same as `await start_load(request)`.

        Waits its turn when others load, too (`LoadRequest.priority`); never reports a success that is partial or stale.
        Cancelling returns within Config.cancel_grace_s; if bytes may still land then, the load is in `quarantines`
        until they have. Who may be cancelled uses `start_load`, whose handle tells.

        Args:
            request: the ticket, and the local blocks to fill.

        Returns:
            What was read, and how long each phase took.

        Raises:
            RequestError: request or ticket cannot be right; PromptMismatch, BlocksBusy.
            PeerError: the producer, or the way to it.
            LoadError: LeaseExpired, PrefillFailed, TransferFailed, Overloaded, DeadlineExceeded. If bytes may still
                land its `quarantine` is the load.
            RuntimeUnavailable: the runtime drains, is closed, or has no cache just now.
            RuntimeBroken: the runtime has to be closed.
        """
        return await self._require_loader(request, "load_blocks").load(request)

    def start_load(self, request: LoadRequest) -> Load:
        """Start to read the blocks that a ticket offers; `await load` gives the report.

        Returns at once: whatever is wrong is raised by awaiting the load. Its blocks may be reused when
        `await load.settled()` returns, however it has ended.

        Args:
            request: the ticket, and the local blocks to fill.

        Returns:
            A handle, which can be awaited, iterated for its progress, cancelled and settled.

        Raises:
            UsageError: called off the runtime's loop, where no load could be awaited.
        """
        try:
            return self._require_loader(request, "start_load").start(request)
        except KVFlowError as error:
            if self.state in _RUNNING:
                require_loop(self._supervisor.loop, "start_load")
            return refused_load(request, error)

    async def release_blocks(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """Give up what a ticket offers without reading it, such as for a request that was rejected before decode.

        One message to each rank, no handshake; its lease ends as if we had read. The offer of a rendezvous may be yet
        to come: then it is waited for, within the ticket's `ttl_s`, and its ranks are connected. A release that comes
        late or twice changes nothing. Legal while the runtime drains. Cancelling stops it; some ranks may have been
        told then.

        Args:
            ticket: as it came from the router.

        Returns:
            True if all ranks were told, within Config.handshake_timeout_s. A producer that has restarted or cannot be
            reached is no error, since leases run out.

        Raises:
            RequestError: the ticket cannot be right.
        """
        return await self._require_cache("release_blocks", new_work=False).remote_leases.release(ticket)

    def keep_leases(self, ticket: Ticket | Mapping[str, Any]) -> AbstractContextManager[None]:
        """Keep what a ticket offers while a request waits for its load, as in `with runtime.keep_leases(ticket): ...`.

        Nothing waits for it: the ticket's ranks are connected, and its leases renewed, beside the block, up to
        Config.lease_lifetime_s; how often is in `statistics().loading.renewals`. A lease that cannot be kept raises
        nothing here; its load says why.

        Args:
            ticket: as it came from the router.

        Returns:
            A context manager; its block is how long the leases are kept.

        Raises:
            RequestError: the ticket cannot be right.
        """
        cache = self._require_cache("keep_leases")
        return self._entered_here(cache.remote_leases.keep_while(cache.resolver.read_ticket(ticket)))

    async def prewarm(
        self, engines: Iterable[PeerAddress | Ticket | Mapping[str, Any]]
    ) -> tuple[KVFlowError | None, ...]:
        """Connect to engines before the first load from them, so that no load waits for a handshake.

        One bad engine does not keep others from being connected. Takes at most Config.handshake_timeout_s for each
        rank. Cancelling stops the waiting; handshakes under way go on.

        Args:
            engines: each named by the address of one of its ranks, or by a ticket of it.

        Returns:
            For each engine, in order, None if all ranks that loads need are connected, else the error.
        """
        cache = self._require_cache("prewarm")
        return await prewarm(cache.own_reach, cache.peers, engines)

    async def forget_peer(self, engine_id: str, address: str | None = None) -> bool:
        """Forget all ranks of an engine, or the one at an address: connections, failures, waits.

        The next load from it starts from scratch. Loads that read from it now go on; the transport forgets the engine
        when they have left. Cancelling stops the waiting.

        Args:
            engine_id: whose ranks.
            address: of one rank; None for all.

        Returns:
            True if it was forgotten within Config.handshake_timeout_s; if not it will be later.
        """
        self._require("forget_peer", new_work=False)
        checks.text(engine_id, "engine_id")
        checks.text("" if address is None else address, "address")
        cache = self._supervisor.cache
        return cache is None or await cache.peers.forget(engine_id, address)

    async def drain(self, deadline_s: float | None = None) -> bool:
        """Take no new work, and wait until all leases and loads have ended, or until `deadline_s`.

        From the first moment `serve_blocks` and `load_blocks` raise RuntimeDraining, and readers that come are refused
        with PeerNotReady unless they have a ticket of an open lease. Draining twice is fine. Cancelling stops the
        waiting: the runtime stays draining, and nothing is revoked.

        Args:
            deadline_s: when leases are revoked and loads ended (Config.drain_timeout_s if None), which takes at most
                Limits.seal_hold_s, cancel_grace_s and drain_timeout_s more.

        Returns:
            True if everything ended before `deadline_s`. `statistics()` counts how leases and loads ended.
        """
        self._require("drain", new_work=False)
        wanted_s = self.config.drain_timeout_s if deadline_s is None else deadline_s
        return await self._supervisor.drain(checks.seconds(wanted_s, "drain: deadline_s", error=UsageError))

    def statistics(self) -> RuntimeStatistics:
        """Counts of what is open now and of what has happened so far. Legal in every state.

        Returns:
            A frozen copy.
        """
        return self._supervisor.statistics()

    def _require(self, what: str, *, new_work: bool) -> None:
        self._supervisor.require(what, new_work=new_work)

    def _require_cache(self, what: str, *, new_work: bool = True) -> RegisteredCache:
        supervisor = self._supervisor
        here = asyncio._get_running_loop() is supervisor.loop
        if here and supervisor.state is RuntimeState.OPEN and supervisor.cache is not None:
            return supervisor.cache  # the usual case, in few steps
        self._require(what, new_work=new_work)
        return supervisor.require_cache()

    def _require_loader(self, request: LoadRequest, what: str) -> Loader:
        """The loader that takes loads now. Observers are told of loads that come while the runtime drains."""
        here = asyncio._get_running_loop() is self._supervisor.loop
        if here and self._supervisor.state is RuntimeState.OPEN and self._supervisor.cache is not None:
            return self._supervisor.cache.loader  # the usual case, in few steps
        try:
            return self._require_cache(what).loader
        except RuntimeUnavailable as error:
            cache = self._supervisor.cache
            if cache is not None and self.state is RuntimeState.DRAINING:
                cache.loader.refuse(request, error)
            raise

    @contextmanager
    def _entered_here(self, kept: AbstractContextManager[None]) -> Iterator[None]:
        require_loop(self._supervisor.loop, "keep_leases")
        with kept:
            yield


def _checked(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts as they were given, none of them twice. ConfigError for what is no part."""
    given = checks.answer(lambda: tuple(parts))
    if given is None:
        raise ConfigError(f"parts: expected a list, got {checks.shown(parts)}")
    found = tuple(checks.instance(one, Part, f"parts[{at}]", error=ConfigError) for at, one in enumerate(given))
    names = [part.name for part in found]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"parts: {', '.join(twice)} is there more than once")
    return found


def _dropped(supervisor: Supervisor) -> None:
    """Close a runtime whose handle is gone, unless it was closed: on its loop, if that is still there."""
    loop = supervisor.loop
    if loop is None or supervisor.inherited:
        return
    warnings.warn(f"runtime {supervisor} was dropped without being closed", ResourceWarning, stacklevel=2)
    if loop.is_closed():
        supervisor.abandon()
    else:
        loop.call_soon_threadsafe(_close_soon, supervisor)


def _close_soon(supervisor: Supervisor) -> None:
    asyncio.ensure_future(supervisor.aclose()).add_done_callback(seen)
