"""The producing engine: it offers prompts, computes them in steps, and checks its cache when the leases are over."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

from kvflow import Lease, ServeRequest
from kvflow.stock.params import make_stock_params
from tests.endurance.caches import Cache
from tests.endurance.homes import STOCK_LEASE_S, Event, Home, Homes
from tests.endurance.plans import STOCK_WIRE, End, Plan, draw, prompt_of, tables_upto
from tests.endurance.samples import sample
from tests.support.stock_engines import StockProducer, stock_cache

BLOCKS = 12_288
_STEP_S = 0.004
_LEASE_TOKENS = 16
_HOUR_S = 3600.0
_HEARD_WITHIN_S = 30.0
_LEASES_A_SECOND = 300  # those that are to run out last until all are open, also on a busy machine


class Producer:
    """Its `do_` methods are verbs of the run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        caches = {
            "plain": Cache("plain", BLOCKS, 16, "HND"),
            "staged": Cache("staged", 1024, 16, "HND"),
            "windowed": Cache("windowed", 1024, 16, "HND"),
            "stock": Cache("stock", layers=stock_cache(1024)),
        }
        self.homes = Homes("producer", caches, None)
        self._wire = StockProducer(num_blocks=512)
        self._wire_cache = Cache(STOCK_WIRE, layers=self._wire.caches[0])
        self._wire_tables: dict[str, tuple[Plan, list[list[int]], asyncio.TimerHandle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[str, set[Lease]] = {name: set() for name in caches}
        self._outcomes: Counter[str] = Counter()
        self._many: dict[int, tuple[Lease, list[list[int]]]] = {}

    async def open(self) -> None:
        await self.homes.open()
        self._keep(self._wire.listen())
        self._keep(self._step_wire())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for agent in self._wire.agents:
            agent.close()
        await self.homes.close()

    async def do_offer(self, number: int) -> dict[str, Any]:
        plan = draw(self._seed, number)
        if plan.producer == STOCK_WIRE:
            return self._offer_by_wire(plan)
        home = self.homes[plan.producer]
        tables = home.cache.take(plan.tokens)
        try:
            return self._offer(plan, home, tables)
        except BaseException:
            home.cache.give_back(tables)
            raise

    def _offer(self, plan: Plan, home: Home, tables: list[list[int]]) -> dict[str, Any]:
        computed = plan.steps[0] if plan.steps else plan.tokens
        now = tables_upto(tables, home.cache.sizes, computed, plan.tokens) if plan.extends else tables

        def fill() -> None:
            home.cache.fill(tables, plan.number, plan.tokens, range(computed))

        ready = None if plan.ready_s is None else Event(plan.ready_s, fill)
        if ready is None:
            fill()
        try:
            lease = home.runtime.serve_blocks(
                ServeRequest(
                    plan.name,
                    home.cache.given(now),
                    plan.tokens,
                    ttl_s=max(plan.soon_s, 1e-3) if plan.end is End.EXPIRED else plan.ttl_s,
                    prompt=prompt_of(plan, plan.prompt and "right"),
                    ready=ready,
                    computed_tokens=computed if plan.steps else None,
                    extends=now != tables,
                    payload=plan.payload,
                )
            )
        except BaseException:
            if ready is not None:
                ready.cancel()
            raise
        if plan.end is End.REVOKED:
            asyncio.get_running_loop().call_later(plan.soon_s, lease.revoke)
        self._open[plan.producer].add(lease)
        self._keep(self._until_over(plan, home, tables, now, lease, ready))
        return make_stock_params(lease.ticket, "0.32.0") if plan.producer == "stock" else lease.ticket.to_params()

    async def do_decline(self, number: int) -> None:
        plan = draw(self._seed, number)
        self.homes[plan.producer].runtime.decline(plan.name, "told to")

    async def do_introduce(self, home: str) -> dict[str, Any]:
        """Return the parameters from which a rendezvous is made."""
        return self.homes[home].runtime.introduce().to_params()

    async def do_upset(self, home: str, how: str) -> None:
        if how == "revoke":
            for lease in self._open[home]:
                lease.revoke()
        else:
            await self.homes.upset(home, how)

    async def do_ports(self) -> list[int]:
        return [int(self.homes[name].runtime.address.rpartition(":")[2]) for name in self._open]

    async def do_settle(self) -> list[str]:
        """Wait until every lease is over and all blocks are free. Return the errors of the cache."""
        while self._wire_tables:
            await asyncio.sleep(0.02)
        while any(self._open.values()):
            await asyncio.sleep(0.02)
        await self.homes.settle()
        self._wire_cache.check_all_free()
        for heard in (self._wire.unknown, self._wire.beats, self._wire.asked):
            del heard[:]
        errors = [*self.homes.errors, *self._wire_cache.errors]
        if self._wire.unexpected is not None:
            errors.append(f"a stock producer does not expect it: {self._wire.unexpected!r}")
        self.homes.errors.clear()
        self._wire_cache.errors.clear()
        return errors

    async def do_sample(self) -> dict[str, Any]:
        return sample()

    async def do_outcomes(self) -> dict[str, int]:
        return self._outcomes

    async def do_open_leases(self, first: int, count: int, read: int) -> dict[str, Any]:
        """Open `count` leases of one block each. Return the tickets of the first `read` leases."""
        home = self.homes["plain"]
        for index in sorted(range(count), key=_runs_out):
            tables = home.cache.take(_LEASE_TOKENS)
            home.cache.fill(tables, first + index, _LEASE_TOKENS, range(_LEASE_TOKENS))
            ttl_s = max(count / _LEASES_A_SECOND, 1.0) if _runs_out(index) else _HOUR_S
            request = ServeRequest(f"lease {first + index}", tables[0], _LEASE_TOKENS, ttl_s=ttl_s)
            self._many[first + index] = home.runtime.serve_blocks(request), tables
            if len(self._many) % 20 == 0:
                await asyncio.sleep(0)
        serving = home.runtime.statistics().serving
        assert serving is not None
        kept = [(number, lease) for number, (lease, _) in self._many.items() if lease.ticket.ttl_s == _HOUR_S]
        tickets = [(number, lease.ticket.to_params()) for number, lease in kept[:: len(kept) // read]]
        return {"open": serving.open_leases, "tickets": tickets}

    async def do_end_leases(self, read: list[int]) -> dict[str, int]:
        """Revoke the leases that do not run out, after the leases in `read` were read. Return the number by outcome."""
        home, outcomes = self.homes["plain"], Counter[str]()
        with contextlib.suppress(TimeoutError):  # then the outcomes tell
            async with asyncio.timeout(_HEARD_WITHIN_S):
                await asyncio.gather(*(self._many[number][0].wait() for number in read))
        for lease, _ in self._many.values():
            if lease.ticket.ttl_s == _HOUR_S:
                lease.revoke()
                await asyncio.sleep(0)
        for number, (lease, tables) in self._many.items():
            outcomes[str(await lease)] += 1
            await asyncio.sleep(0)  # a lease that has ended is awaited at once, and others want an answer
            wrong = home.cache.difference(tables, number, _LEASE_TOKENS)
            if wrong:
                home.cache.errors.append(f"leased blocks have changed: {wrong}")
            home.cache.give_back(tables)
        self._many.clear()
        return outcomes

    async def _until_over(
        self, plan: Plan, home: Home, tables: list[list[int]], now: list[list[int]], lease: Lease, ready: Event | None
    ) -> None:
        computed = plan.steps[0] if plan.steps else plan.tokens
        if plan.steps:
            computed = await self._compute(plan, home, tables, now, lease)
        if ready is not None:
            await ready.over()
        outcome = await lease
        self._open[plan.producer].discard(lease)
        self._outcomes[str(outcome)] += 1
        wrong = home.cache.difference(tables, plan.number, plan.tokens, range(computed))
        if wrong:
            self.homes.errors.append(f"{plan}: what was leased has changed: {wrong}")
        home.cache.give_back(tables)

    async def _compute(
        self, plan: Plan, home: Home, tables: list[list[int]], now: list[list[int]], lease: Lease
    ) -> int:
        """Step by step; how many tokens were computed."""
        computed, last = plan.steps[0], len(plan.steps)
        for index, step in enumerate((*plan.steps[1:], plan.tokens), 1):
            await asyncio.sleep(plan.soon_s * _STEP_S / 0.01)
            if plan.fails and index == last:
                lease.fail("told to")
                break
            upto = tables_upto(tables, home.cache.sizes, step, plan.tokens) if plan.extends else now
            if upto != now:
                lease.extend(home.cache.given([new[len(old) :] for old, new in zip(now, upto, strict=True)]))
                now = upto
            home.cache.fill(tables, plan.number, plan.tokens, range(computed, step))
            computed = step
            if index == last and plan.payload:
                lease.complete(plan.name.encode())
            else:
                lease.advance(step)
        return computed

    def _offer_by_wire(self, plan: Plan) -> dict[str, Any]:
        tables = self._wire_cache.take(plan.tokens)
        self._wire_cache.fill(tables, plan.number, plan.tokens, range(plan.tokens))
        over = asyncio.get_running_loop().call_later(STOCK_LEASE_S, self._wire_over, plan.name, "stock expired")
        self._wire_tables[plan.name] = plan, tables, over
        return self._wire.offer(plan.name, tables[0], plan.tokens)

    def _wire_over(self, name: str, outcome: str) -> None:
        plan, tables, timer = self._wire_tables.pop(name)
        timer.cancel()
        self._wire.held[0].pop(name, None)
        self._outcomes[outcome] += 1
        wrong = self._wire_cache.difference(tables, plan.number, plan.tokens)
        if wrong:
            self._wire_cache.errors.append(f"{plan}: {wrong}")
        self._wire_cache.give_back(tables)

    async def _step_wire(self) -> None:
        """Do the work of a stock worker in one of an engine's steps."""
        while True:
            self._wire.step()
            for name in self._wire.freed[0]:
                self._wire_over(name, "stock read")
            self._wire.freed[0].clear()
            await asyncio.sleep(0.005)

    def _keep(self, body: Any) -> None:
        task = asyncio.create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.homes.errors.append(f"{task.get_name()}: {error!r}")


def _runs_out(index: int) -> bool:
    """Of many leases: those open last, so that all are open at once."""
    return index % 3 == 0
