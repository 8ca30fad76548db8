"""The Runtime, the object that users hold. It checks that a call is allowed, and passes the call on.

A runtime belongs to the event loop that opened it. A method that is called on another loop or thread raises UsageError.
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
from kvflow.core.bounds import WEIGHTS_CHARS_MAX
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket, read_ticket
from kvflow.errors import ConfigError, KVFlowError, RequestError, RuntimeUnavailable, UsageError
from kvflow.runtime.load.leases import KeptLeases, warn_if_never_entered
from kvflow.runtime.load.load import Load, refused_load
from kvflow.runtime.load.loader import Loader
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.memory import BlockCopier
from kvflow.runtime.part import Part, PartHost
from kvflow.runtime.peers.prewarm import prewarm
from kvflow.runtime.producer.lease import Lease, ServeRequest
from kvflow.runtime.records import Observer, Observers
from kvflow.runtime.statistics import RuntimeState, RuntimeStatistics
from kvflow.runtime.supervisor import Supervisor
from kvflow.runtime.tasks import mark_retrieved, require_loop
from kvflow.runtime.world import World

_PART_NAME_CHARS_MAX = 64
_RUNNING = (RuntimeState.OPEN, RuntimeState.DRAINING)


class Runtime:
    """The KV-cache transfer runtime of one rank of an engine. Use it as `async with Runtime(config) as rt`.

    If a runtime is dropped without being closed, it is closed in the background, with a ResourceWarning.

    Args:
        config: settings of the rank.
        observers: objects that get a record of every ended load and lease.
        world: replaces transport, side channel, clock and random numbers, for tests.
        parts: optional features, for example `kvflow.prefix.Prefixes` or `kvflow.storage.Storage`. They begin and end
            in this order.

    Raises:
        ConfigError: an argument has the wrong type.
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
        self._observers = Observers(observers, errors_logged_only=world.logs_observer_errors)
        self._supervisor = Supervisor(config, self._observers, world, _checked_parts(parts))
        self._drop = weakref.finalize(self, _close_dropped, self._supervisor)
        self._drop.atexit = False
        if not world.real_process:
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
        """Address of this rank's side channel, as in its tickets."""
        self._supervisor.require_running()
        return self._supervisor.address

    @property
    def quarantines(self) -> tuple[Load, ...]:
        """Ended loads that may still write to their blocks. Reuse the blocks only after `await load.settled()`."""
        registered = self._supervisor.registered
        return registered.loader.quarantines if registered else ()

    async def __aenter__(self) -> Self:
        """Start the transport, the listener and the poller. If cancelled, the runtime is closed.

        Raises:
            ConfigError: one of them could not be started.
        """
        try:
            await self._supervisor.open()
        finally:
            if self.state is RuntimeState.CLOSED:  # it never opened, so nothing is left to close
                self._drop.detach()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the runtime: refuse new work, let loads and leases finish, revoke the rest, deregister, stop all tasks.

        This takes at most 2 * Config.drain_timeout_s + Config.cancel_grace_s + Limits.seal_hold_s +
        Limits.goodbye_timeout_s + 2 * Limits.transport_close_timeout_s, and the last of these times also for each part
        that does not release the cache in time. Closing twice is fine. If the runtime's loop is
        closed, this may be called on any other loop. In a forked child, forget the parent's runtime and close nothing.
        Cancelling stops the waiting; the closing goes on.

        Raises:
            RuntimeBroken: reads or a copy could not be stopped, or a part (optional feature) failed; all else is
                closed. Keep the registered memory until the process ends.
            UsageError: called on another loop while the runtime's loop is open.
        """
        loop = self._supervisor.loop
        if self._supervisor.in_forked_child and loop is not None:
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
        """Register the cache, so that peers can read it and loads can write to it.

        A runtime has one cache at a time. If `unregister` is under way, wait for its end first. The runtime refers to
        the tensors until they are unregistered or the runtime is closed. If the transport cannot read the cache's
        device, or Config.staging is "always", blocks go through host buffers. If cancelled, no cache is registered.

        Args:
            kv_caches: a dict of tensors by layer name if all layers share a block table; else a list of `CacheGroup`s,
                for example for layers with a sliding window.
            layout: layout of the tensors in a dict. A `CacheGroup` has its own layout.
            copy_blocks: copies blocks between host buffers and the cache. By default kvflow copies them, for which
                torch must be able to index the tensors.

        Raises:
            LayoutError: the tensors do not match their layout, or the groups do not fit together.
            ConfigError: the transport cannot read the tensors' device, and there can be no host buffers (Config.staging
                is "never", or `kvflow.staging` is not installed); or the memory cannot be registered.
            UsageError: a cache is registered already.
        """
        self._require("register_kv_caches", new_work=True)
        await self._supervisor.register(kv_caches, layout, copy_blocks)

    async def unregister(self) -> None:
        """Unregister the cache, for example before an engine sleeps. Afterwards no byte of it is read or written.

        First, all leases are revoked, loads and later calls fail with CacheUnregistered, and questions of peers are
        refused for now. Then the runtime waits for reads and copies under way, sends goodbyes to readers, and
        deregisters the memory. After that `register_kv_caches` accepts another cache, of any layout. The new
        registration is another incarnation: no earlier ticket, seal or connection is valid for it.

        This takes at most Config.cancel_grace_s + Config.drain_timeout_s + Limits.seal_hold_s +
        Limits.goodbye_timeout_s + 2 * Limits.transport_close_timeout_s. Without a cache, do nothing. Concurrent calls
        wait for the same unregistration. Cancelling stops the waiting; the unregistration goes on. Then call
        `unregister` again: once that call has returned, the cache may be freed.

        Raises:
            RuntimeBroken: reads or a copy could not be stopped. Keep the memory until the runtime is closed.
            UsageError: a cache is being registered.
        """
        self._require("unregister", new_work=False)
        await self._supervisor.unregister()

    def serve_blocks(self, request: ServeRequest) -> Lease:
        """Offer blocks to readers. The lease is open when this returns.

        Args:
            request: the blocks, in prompt order, and the tokens of the prompt that they hold.

        Returns:
            The lease. Send `lease.ticket` to the consumer; await the lease for its outcome.

        Raises:
            RequestError: the request is wrong. BlocksBusy: a block is being loaded.
            Overloaded: too many leases are open (Limits.leases_max). HostBlocksBusy: too few host blocks are free
                (Config.host_buffer_bytes_max).
            LayoutError: a tensor of the cache has moved since the cache was registered.
            RuntimeUnavailable: the runtime is draining or closed, or has no cache now.
        """
        return self._require_host("serve_blocks").serving.serve(request)

    def introduce(self) -> Ticket:
        """Return a ticket that describes this rank. It offers no blocks and opens no lease.

        From this ticket a router or scheduler makes tickets for requests: `Ticket.rendezvous`, `Ticket.without_leases`.
        An engine of several ranks merges the tickets of its ranks (`merge_tickets`). The ticket is valid until the
        cache is unregistered.

        Returns:
            The ticket.

        Raises:
            RuntimeUnavailable: the runtime is draining or closed, or has no cache now.
        """
        return self._require_host("introduce").serving.introduce()

    def decline(
        self,
        request_id: str,
        reason: str = "",
        *,
        at: Ticket | Mapping[str, Any] | None = None,
        instead: Ticket | Mapping[str, Any] | None = None,
    ) -> None:
        """Announce that a request will not be served, for example since it was rejected or its prefill failed.

        Loads of a pending ticket (`Ticket.rendezvous`) that wait for the request's offer fail with PrefillFailed, which
        has the reason. For a while, later loads of the request fail too. A later `serve_blocks` with the same
        request id takes the announcement back. Allowed while the runtime drains. An engine of several ranks declines on
        each rank.

        A router may send a request to this engine while its readers wait at another engine. Then pass `at`: the ranks
        of that engine are notified in the background, and nothing is declined here. Do this on one rank of this engine.

        Args:
            request_id: the request id in the pending ticket.
            reason: goes into the readers' errors.
            at: the pending ticket of the readers that wait at another engine.
            instead: with `at`, a pending ticket of the same request at this engine, where the readers continue.

        Raises:
            RequestError: the request is being served, or `request_id`, `reason`, `at` or `instead` is wrong.
        """
        host = self._require_host("decline", new_work=False)
        wanted = checks.request_id(request_id)
        what = f"request {wanted!r}: decline"
        why = checks.text(reason, f"{what}: reason")
        if at is None:
            host.serving.decline(wanted, why)
            return
        host.optional.growing(what).pending_tickets.redirect_readers(wanted, why, at, instead)

    async def load_blocks(self, request: LoadRequest) -> LoadReport:
        """Read the blocks that a ticket offers into local blocks. The same as `await start_load(request)`.

        Concurrent loads take turns (`LoadRequest.priority`). A partial or stale read never counts as a success. If
        cancelled, return within Config.cancel_grace_s; if bytes may still land then, the load stays in `quarantines`
        until no byte can land. If your task may be cancelled, use `start_load`: the handle shows whether bytes may
        land.

        Args:
            request: the ticket, and the local blocks to fill.

        Returns:
            A report of the read tokens, blocks and bytes, and of the seconds of each phase.

        Raises:
            RequestError: the request or its ticket is wrong. Also PromptMismatch and BlocksBusy.
            LayoutError: a tensor of the cache has moved since the cache was registered.
            PeerError: the producer, or the connection to it, failed.
            LoadError: LeaseExpired, PrefillFailed, TransferFailed, Overloaded or DeadlineExceeded. If bytes may still
                land, the error's attribute `quarantine` is the load.
            RuntimeUnavailable: the runtime is draining or closed, or has no cache now.
            RuntimeBroken: the runtime can only be closed.
        """
        return await self._require_loader(request, "load_blocks").load(request)

    def start_load(self, request: LoadRequest) -> Load:
        """Start to read the blocks that a ticket offers, and return a handle. `await load` gives the report.

        Every error but UsageError is raised by awaiting the load; asyncio logs errors of loads that nobody awaits.
        After any outcome, the local blocks may be reused once `await load.settled()` has returned.

        Args:
            request: the ticket, and the local blocks to fill.

        Returns:
            The handle: await it, iterate over its progress, cancel it, or await its `settled()`.

        Raises:
            UsageError: not called on the runtime's loop.
        """
        try:
            return self._require_loader(request, "start_load").start(request)
        except KVFlowError as error:
            if self.state in _RUNNING:
                require_loop(self._supervisor.loop, "start_load")
            return refused_load(request, error)

    async def release_blocks(self, ticket: Ticket | Mapping[str, Any]) -> bool:
        """Release the leases of a ticket without reading them, for example if the request was rejected before decode.

        This sends one message to each rank, without a handshake. The lease then ends as if it had been read. For a
        pending ticket, the call makes handshakes with the ticket's ranks, and waits for the offer, within the ticket's
        `ttl_s`. A late or repeated release changes nothing. Allowed while the runtime drains. If cancelled, some ranks
        may have been notified.

        Args:
            ticket: the ticket from the router.

        Returns:
            True if all ranks were notified within Config.handshake_timeout_s. A producer that restarted or cannot be
            reached is not an error, since leases expire.

        Raises:
            RequestError: the ticket is wrong.
        """
        return await self._require_host("release_blocks", new_work=False).leases.release(ticket)

    def keep_leases(self, ticket: Ticket | Mapping[str, Any]) -> AbstractContextManager[KeptLeases]:
        """Renew the leases of a ticket while a request waits for its load: `with runtime.keep_leases(ticket): ...`.

        Without `with`, nothing is renewed, and a warning is logged.

        Entering the context does not wait: in the background the ticket's ranks are connected and the leases renewed,
        for at most Config.lease_lifetime_s. `statistics().loading.renewals` counts the renewals. If a lease cannot be
        renewed, only the load of the ticket raises the error.

        Args:
            ticket: the ticket from the router.

        Returns:
            A context manager. The leases are renewed until its `with` body ends. `with ... as kept` gives a
                `KeptLeases`: `await kept.opened()` waits until the leases are open, as those of a pending ticket may
                not be yet.

        Raises:
            RequestError: the ticket is wrong.
        """
        host = self._require_host("keep_leases")
        known, entered = host.resolver.read_ticket(ticket), list[bool]()
        kept = self._keep_on_loop(host.leases.renewing(known), entered)
        weakref.finalize(kept, warn_if_never_entered, entered, known.request_id).atexit = False
        return kept

    def set_weights(self, version: str) -> None:
        """Announce that the engine has other weights than before, for example after a step of training.

        Call this when the weights are replaced, and your own prefix cache is empty: all leases end, so that readers
        get LeaseExpired, and loads under way fail. Later tickets, shared prefixes and saves are of the new version.
        Those of another version are refused (WeightsMismatch), or not found; an engine that was never told has none,
        which is a version, too. The version outlasts `unregister`. If it is the present one, nothing happens.

        Tell every rank of every engine. No cache need be registered; allowed while the runtime drains.

        Args:
            version: name of the weights, such as "step-700": at most 128 printable characters without spaces.

        Raises:
            RequestError: `version` is no such name.
            RuntimeUnavailable: the runtime is closed.
        """
        self._require("set_weights", new_work=False)
        self._supervisor.set_weights(checks.name(version, "set_weights: version", most=WEIGHTS_CHARS_MAX))

    async def prewarm(
        self, engines: Iterable[PeerAddress | Ticket | Mapping[str, Any]]
    ) -> tuple[KVFlowError | None, ...]:
        """Connect to engines before the first load from them, so that no load waits for a handshake.

        The failure of one engine does not affect others. This takes at most Config.handshake_timeout_s for each rank.
        Cancelling stops the waiting; handshakes under way go on.

        Args:
            engines: for each engine, the address of a rank or a ticket.

        Returns:
            For each engine, in order: None if all ranks that loads need are connected, else the error.
        """
        host = self._require_host("prewarm")
        return await prewarm(host.kvflow_resolver, host.peers, engines)

    async def forget_peer(self, engine_id: str, address: str | None = None) -> bool:
        """Forget the connections, failures and back-off of all ranks of an engine, or of the rank at one address.

        The next load from the engine connects again. Loads that read from it now go on. Cancelling stops the waiting.

        Args:
            engine_id: the engine.
            address: address of one rank; None for all ranks.

        Returns:
            True if the transport dropped the connections within Config.handshake_timeout_s; if False, it drops them
            later.
        """
        self._require("forget_peer", new_work=False)
        checks.text(engine_id, "engine_id")
        checks.text("" if address is None else address, "address")
        incarnation = self._supervisor.incarnation
        return incarnation is None or await incarnation.peers.forget(engine_id, address)

    async def drain(
        self, deadline_s: float | None = None, *, successor: Ticket | Mapping[str, Any] | None = None
    ) -> bool:
        """Refuse new work, and wait up to `deadline_s` until all leases and loads have ended.

        From the call on, `serve_blocks` and `load_blocks` raise RuntimeDraining, and new readers get PeerNotReady
        unless they have a ticket of an open lease. Draining twice is fine. If cancelled, the runtime stays draining,
        and nothing is revoked.

        Args:
            deadline_s: seconds after which leases are revoked and loads ended; None: Config.drain_timeout_s. Ending
                them takes at most Limits.seal_hold_s, cancel_grace_s and drain_timeout_s more.
            successor: any ticket of the engine that takes this engine's place, such as that of its `introduce`. Loads
                that wait here with a pending ticket go on there, and goodbyes name that engine.

        Returns:
            True if everything ended within `deadline_s`. `statistics()` counts the outcomes of leases and loads.

        Raises:
            RequestError: `successor` is no ticket, or a ticket of this engine.
            RuntimeUnavailable, UsageError: the runtime is not open, or this is not its loop.
        """
        self._require("drain", new_work=False)
        wanted_s = self.config.drain_timeout_s if deadline_s is None else deadline_s
        bound_s = checks.seconds(wanted_s, "drain: deadline_s", error=UsageError)
        ticket = None if successor is None else read_ticket(successor, self.config.limits.block_ids_max)
        if ticket is not None and ticket.engine_id == self.config.engine_id:
            raise RequestError(f"drain: successor: a ticket of engine {ticket.engine_id!r}, which is this one")
        return await self._supervisor.drain(bound_s, ticket)

    def statistics(self) -> RuntimeStatistics:
        """Return the state of the runtime, its open objects, and counts of past events. Allowed in every state.

        Returns:
            An immutable snapshot.
        """
        return self._supervisor.statistics()

    def _require(self, what: str, *, new_work: bool) -> None:
        self._supervisor.require(what, new_work=new_work)

    def _require_host(self, what: str, *, new_work: bool = True) -> PartHost:
        supervisor = self._supervisor
        here = asyncio._get_running_loop() is supervisor.loop
        if here and supervisor.state is RuntimeState.OPEN and supervisor.incarnation is not None:
            return supervisor.incarnation.host  # the usual case, kept fast
        self._require(what, new_work=new_work)
        return supervisor.require_host()

    def _require_loader(self, request: LoadRequest, what: str) -> Loader:
        """Return the loader if the runtime takes new loads, else raise the error that says why not.

        If the runtime is draining, report `request` to the observers as a refused load. `what` names the called method.
        """
        here = asyncio._get_running_loop() is self._supervisor.loop
        if here and self._supervisor.state is RuntimeState.OPEN and self._supervisor.incarnation is not None:
            return self._supervisor.incarnation.loader  # the usual case, kept fast
        try:
            return self._require_host(what).loader
        except RuntimeUnavailable as error:
            incarnation = self._supervisor.incarnation
            if incarnation is not None and self.state is RuntimeState.DRAINING:
                incarnation.loader.refuse(request, error)
            raise

    @contextmanager
    def _keep_on_loop(self, renewing: AbstractContextManager[KeptLeases], entered: list[bool]) -> Iterator[KeptLeases]:
        entered.append(True)
        require_loop(self._supervisor.loop, "keep_leases")
        with renewing as kept:
            yield kept


def _checked_name(part: Part, what: str) -> str:
    return checks.name(getattr(part, "name", None), what, most=_PART_NAME_CHARS_MAX, error=ConfigError)


def _checked_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return `parts` as a tuple. ConfigError if an item is not a `Part`, or a name occurs twice."""
    listed = checks.try_call(lambda: tuple(parts))
    if listed is None:
        raise ConfigError(f"parts: expected a list, got {checks.short_repr(parts)}")
    checked = tuple(
        checks.instance(part, Part, f"parts[{index}]", error=ConfigError) for index, part in enumerate(listed)
    )
    names = [_checked_name(part, f"parts[{index}].name") for index, part in enumerate(checked)]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"parts: {', '.join(twice)} is listed more than once")
    return checked


def _close_dropped(supervisor: Supervisor) -> None:
    """Close an open runtime after its `Runtime` object was freed.

    If the runtime's event loop is closed, release sockets, threads and memory without a loop.
    """
    loop = supervisor.loop
    if loop is None or supervisor.in_forked_child:
        return
    warnings.warn(f"runtime {supervisor} was dropped without being closed", ResourceWarning, stacklevel=2)
    if loop.is_closed():
        supervisor.abandon()
    else:
        loop.call_soon_threadsafe(_close_soon, supervisor)


def _close_soon(supervisor: Supervisor) -> None:
    asyncio.ensure_future(supervisor.aclose()).add_done_callback(mark_retrieved)
