"""The consuming engine: many loads at once, each judged by its drawn faults, and by every byte."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvflow import Load, LoadReport, LoadRequest, Ticket
from kvflow.errors import KVFlowError
from kvflow.storage import RestoreRequest, SaveRequest
from tests.endurance.caches import Cache
from tests.endurance.homes import Event, Home, Homes
from tests.endurance.plans import STOCK_WIRE, End, Plan, draw, prompt_of
from tests.endurance.samples import sample
from tests.support.stock_engines import StockConsumer, stock_cache
from tests.support.verbs import Client, EngineError

ERRORS_MAX = 50


class Consumer:
    """Its `do_` methods are verbs of the run."""

    def __init__(self, seed: int, first: int, workers: int, engine_id: str, store_dir: str, producer: Path) -> None:
        self._seed = seed
        caches = {
            "plain": Cache("plain", 1536, 16, "HND"),
            "staged": Cache("staged", 2048, 8, "NHD"),
            "windowed": Cache("windowed", 2048, 8, "HND"),
            "stock": Cache("stock", layers=stock_cache(2048)),
        }
        self.homes = Homes(engine_id, caches, store_dir)
        self._reads_by_wire = first == 0
        self._wire = StockConsumer(num_blocks=1024)
        self._wire_cache = Cache(STOCK_WIRE, layers=self._wire.cache)
        self._numbers = itertools.count(first)
        self._workers_count = workers
        self._workers: list[asyncio.Task[None]] = []
        self._address = producer
        self._producer = Client()
        self._go = asyncio.Event()
        self._active: dict[int, tuple[Plan, set[str]]] = {}
        self._troubles: dict[int, tuple[str, Collection[str]]] = {}
        self._outcomes: Counter[str] = Counter()
        self._features: Counter[str] = Counter()
        self._errors: list[str] = []

    async def open(self) -> None:
        await self.homes.open()
        await self._producer.connect(self._address)
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._workers_count)]

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        await self._producer.close()
        await self.homes.close()
        self._wire.close()

    async def do_go(self) -> None:
        self._go.set()

    async def do_settle(self) -> list[str]:
        """Start no loads until `go`. Once all have ended, return the errors."""
        self._go.clear()
        while self._active:
            await asyncio.sleep(0.02)
        await self.homes.settle()
        self._wire_cache.check_all_free()
        errors = [*self._errors, *self.homes.errors, *self._wire_cache.errors]
        for some in (self._errors, self.homes.errors, self._wire_cache.errors):
            some.clear()
        return errors

    async def do_sample(self) -> dict[str, Any]:
        return sample()

    async def do_outcomes(self) -> dict[str, Any]:
        return {"outcomes": self._outcomes, "features": self._features}

    async def do_trouble(self, key: int, where: str, kinds: list[str]) -> None:
        """Loads of that home ("producer plain"; "": of any), under way or to come, may end so, too."""
        self._troubles[key] = where, kinds
        for plan, allowed in self._active.values():
            if _concerns(plan, where):
                allowed.update(kinds)

    async def do_over(self, key: int) -> None:
        del self._troubles[key]

    async def do_upset(self, home: str, how: str) -> None:
        if how == "forget":
            await self.homes[home].runtime.forget_peer(f"producer-{home}")
        else:
            await self.homes.upset(home, how)

    async def do_cut(self, ports: list[int]) -> int:
        return self.homes.cut_side_channels(ports)

    async def do_freeze(self) -> None:
        """Stop this process while no read of it is under way: over tcp its death can take its producer along."""
        while self.homes.open_reads:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    async def do_read_leases(self, tickets: list[tuple[int, dict[str, Any]]]) -> dict[str, int]:
        """All at once; how they ended."""
        return Counter(await asyncio.gather(*(self._read_lease(number, ticket) for number, ticket in tickets)))

    async def _read_lease(self, number: int, ticket: dict[str, Any]) -> str:
        home = self.homes["plain"]
        tables = home.cache.take(16)
        try:
            await home.runtime.load_blocks(LoadRequest(f"lease {number}", ticket, tables[0]))
            self._compare(home.cache, tables, number, 16)
            return "loaded"
        except KVFlowError as error:
            return type(error).__name__
        finally:
            home.cache.give_back(tables)

    async def _work(self) -> None:
        while True:
            await self._go.wait()
            plan = draw(self._seed, next(self._numbers))
            if plan.consumer != STOCK_WIRE or self._reads_by_wire:
                await self._one(plan)

    async def _one(self, plan: Plan) -> None:
        allowed = {kind for where, kinds in self._troubles.values() if _concerns(plan, where) for kind in kinds}
        self._active[plan.number] = plan, allowed
        text = ""
        try:
            outcome = await (self._read_by_wire(plan) if plan.consumer == STOCK_WIRE else self._load(plan))
        except (KVFlowError, EngineError) as error:
            outcome = error.kind if isinstance(error, EngineError) else type(error).__name__
            text = str(error)
        except Exception as error:  # noqa: BLE001 - the worker goes on
            outcome, text = f"bug {type(error).__name__}", str(error)
        finally:
            del self._active[plan.number]
        self._outcomes[outcome] += 1
        self._features.update(plan.features)
        if outcome not in plan.outcomes | allowed:
            self._error(f"{plan} ended as {outcome} ({text}), expected {sorted(plan.outcomes | allowed)}")

    async def _load(self, plan: Plan) -> str:
        home = self.homes[plan.consumer]
        tables = [[] for _ in home.cache.groups] if plan.hit else home.cache.take(plan.tokens, plan.cached)
        cached = plan.tokens if plan.hit else _first(home, tables, plan.tokens)
        legs = _Legs(self._producer, plan)
        after = load = None
        try:
            ticket = await legs.ticket()
            if plan.end is End.RELEASED:
                return "released" if await home.runtime.release_blocks(ticket) else "not released"
            if plan.after_s is not None:
                after = Event(plan.after_s, lambda: home.cache.check_free(tables, "was written to before its event"))
            with home.runtime.keep_leases(ticket) if plan.keep else contextlib.nullcontext():
                if plan.keep:
                    await asyncio.sleep(plan.soon_s)
                load = home.runtime.start_load(_request(plan, ticket, home.cache.given(tables), after, cached))
                ending = None
                if plan.end is End.CANCELLED:
                    ending = asyncio.get_running_loop().call_later(plan.soon_s, load.cancel)
                report = None
                try:
                    report = await self._report(plan, home, tables, load, legs)
                finally:
                    if ending is not None:
                        ending.cancel()
                    if report is None and plan.release:
                        with contextlib.suppress(KVFlowError):
                            await home.runtime.release_blocks(ticket)
            if report is None:
                return "cancelled"
            self._judge(plan, home, tables, report)
            if plan.store and not plan.hit:
                await self._store(plan, home, tables)
            return "loaded"
        finally:
            if load is not None:
                await load.settled()
            if after is not None:
                after.cancel()
            home.cache.give_back(tables)

    async def _report(
        self, plan: Plan, home: Home, tables: list[list[int]], load: Load, legs: _Legs
    ) -> LoadReport | None:
        """None for a load that was cancelled, as drawn."""
        try:
            await legs.second(load)
            if plan.follow:
                async for progress in load:
                    span = range(_first(home, tables, plan.tokens), plan.tokens)[: progress.tokens]
                    wrong = home.cache.difference(tables, plan.number, plan.tokens, span)
                    if wrong and progress.tokens < progress.tokens_in_all:
                        self._error(f"{plan}: {progress} is told, but {wrong}")
            return await load
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if plan.end is not End.CANCELLED or (task is not None and task.cancelling()):
                raise
            return None

    def _judge(self, plan: Plan, home: Home, tables: list[list[int]], report: LoadReport) -> None:
        self._compare(home.cache, tables, plan.number, plan.tokens)
        home.cache.check_around(tables)
        found = report.tokens, report.payload, str(report.verification), report.freshness
        wanted = (
            0 if plan.hit else plan.tokens - _first(home, tables, plan.tokens),
            plan.name.encode() if plan.payload else b"",
            "verified" if plan.verify and not plan.hit else "off",
            "deadline" if plan.producer == STOCK_WIRE and not plan.hit else "seal",
        )
        if found != wanted:
            self._error(f"{plan}: reported are {found}, expected {wanted}")

    async def _store(self, plan: Plan, home: Home, tables: list[list[int]]) -> None:
        """Save the loaded blocks, and restore them elsewhere a little later, unless the entry was evicted."""
        key, count = plan.name, len(tables[0])
        tokens = plan.tokens - _first(home, tables, plan.tokens)
        await home.storage.save(SaveRequest(plan.name, key, tables[0], tokens))
        await asyncio.sleep(plan.soon_s)
        fresh = home.cache.take(count * home.cache.sizes[0])
        try:
            await home.storage.restore(RestoreRequest(plan.name, key, fresh[0], tokens))
            self._compare(home.cache, fresh, plan.number, plan.tokens, whole=True)
            self._outcomes["restored"] += 1
        finally:
            home.cache.give_back(fresh)

    async def _read_by_wire(self, plan: Plan) -> str:
        """Read as a stock engine does, without a proof of freshness."""
        params = await self._producer.call("offer", number=plan.number)
        if not self._wire.remote:
            await self._wire.handshake(params)
        if plan.hit:
            self._wire.notify(f"{params['remote_request_id']}:1".encode())
            return "loaded"
        tables = self._wire_cache.take(plan.tokens, plan.cached)
        try:
            await self._wire.read(params, tables[0])
            self._compare(self._wire_cache, tables, plan.number, plan.tokens, whole=True)
        finally:
            self._wire_cache.give_back(tables)
        return "loaded"

    def _compare(self, cache: Cache, tables: list[list[int]], number: int, tokens: int, *, whole: bool = False) -> None:
        wrong = cache.difference(tables, number, tokens, whole=whole)
        if wrong:
            self._error(f"load {number}: {draw(self._seed, number)}: {wrong}")

    def _error(self, text: str) -> None:
        if len(self._errors) < ERRORS_MAX:
            self._errors.append(text)


class _Legs:
    """The source of a load's ticket: an offer made before, or a rendezvous in either order."""

    def __init__(self, producer: Client, plan: Plan) -> None:
        self._producer = producer
        self._plan = plan
        self._offer_follows = plan.rendezvous and plan.number % 2 == 1

    async def ticket(self) -> dict[str, Any]:
        plan = self._plan
        if not plan.rendezvous:
            offered: dict[str, Any] = await self._producer.call("offer", number=plan.number)
            return offered
        introduction = await self._producer.call("introduce", home=plan.producer)
        if not self._offer_follows:
            await self._offer()
        return Ticket.rendezvous(introduction, plan.name, ttl_s=20.0).to_params()

    async def second(self, load: Load) -> None:
        """The producer's leg, if it is the later one."""
        if self._offer_follows:
            await asyncio.sleep(self._plan.soon_s)
            try:
                await self._offer()
            except EngineError:
                load.cancel()
                raise

    async def _offer(self) -> None:
        await self._producer.call("decline" if self._plan.declined else "offer", number=self._plan.number)


def _request(
    plan: Plan, ticket: dict[str, Any], block_ids: Any, after: Event | None, cached_tokens: int
) -> LoadRequest:
    return LoadRequest(
        plan.name,
        ticket,
        block_ids,
        deadline_s=max(plan.soon_s, 1e-4) if plan.end is End.LATE else None,
        priority=plan.priority,
        prompt=prompt_of(plan, plan.prompt),
        after=after,
        verify=plan.verify or None,
        cached_tokens=cached_tokens,
    )


def _first(home: Home, tables: list[list[int]], tokens: int) -> int:
    """The first token of a prompt that its blocks hold."""
    size = home.cache.sizes[0]
    return (-(-tokens // size) - len(tables[0])) * size


def _concerns(plan: Plan, where: str) -> bool:
    return where in ("", f"producer {plan.producer}", f"consumer {plan.consumer}")
