"""The prefix cache of a simulated engine: blocks that outlive their requests, until the engine needs them.

A block that is not pinned may be evicted at any moment, and is overwritten at once. If that frees too few blocks, the
engine takes back blocks that are pinned for readers, and uses them at once: the engine never waits for a reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.errors import RuntimeUnavailable
from kvflow.prefix.prefix_cache import PinnedPrefix
from kvflow.prefix.sharing import SharedPrefixes
from kvflow.runtime.producer.lease import Lease, ServeRequest
from tests.simulator.prompts import SPAN, Path, SimPrompt
from tests.simulator.work import all_over

if TYPE_CHECKING:
    from tests.simulator.engine import SimEngine
    from tests.simulator.work import SimRank

_SLOW_SHARE = 0.2  # share of prefix caches that answer late, as from another process
_SLOW_S = 0.005  # mean delay of their answers
_FAILS_SHARE = 0.02


@dataclass(slots=True, eq=False)
class Kept:
    """A block in the prefix cache. It holds the end of the prefix `path`."""

    group: int
    path: Path
    block: int
    weights: int
    """Number of the weights with which the block is computed. The engine finds it only while it has these."""
    written: bool = False
    """True once the block holds its tokens."""

    @property
    def block_ids(self) -> list[int]:
        return [self.block]

    def __str__(self) -> str:
        return f"the prefix cache, {len(self.path[1])} tokens"


@dataclass(slots=True, eq=False)
class SimPinned:
    """A prefix that one rank has pinned."""

    run: PinnedPrefix
    blocks: list[Kept]
    known: bool
    """True once the rank's runtime has got the prefix."""


@dataclass(slots=True, eq=False)
class RankPrefixCache:
    """The `PrefixCache` of one rank. All ranks of an engine keep the same blocks, and each pins for its own readers."""

    prefix_cache: SimPrefixCache
    rank: SimRank
    slow: bool
    pins: Counter[int] = field(default_factory=Counter)
    """Number of pins of each block."""
    runs: dict[int, SimPinned] = field(default_factory=dict)
    """Pinned prefixes by the identity of the `PinnedPrefix` that the runtime has got."""
    leases: list[Lease] = field(default_factory=list)
    """All leases that the rank's runtime has opened for readers of prefixes."""
    sharing: SharedPrefixes | None = None

    def share(self, pinned_blocks_max: int | None) -> None:
        books = self.rank.runtime._supervisor.incarnation
        assert books is not None, "registered before"
        vars(books.serving)["serve"] = partial(self._serve, books.serving.serve)
        self.sharing = self.rank.prefixes.share(self, pinned_blocks_max=pinned_blocks_max)

    def _serve(
        self, serve: Callable[..., Lease], request: ServeRequest, *, hold_blocks: bool = True, **more: bool
    ) -> Lease:
        """Open a lease. Note it if it is of a prefix: only leases of prefixes have no hold."""
        lease = serve(request, hold_blocks=hold_blocks, **more)
        if not hold_blocks:
            self.rank.served += 1
            self.leases.append(lease)
        return lease

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | Awaitable[PinnedPrefix | None] | None:
        engine = self.prefix_cache.engine
        if self.prefix_cache.simulation.rng.random() < _FAILS_SHARE:
            raise RuntimeError("simulated")
        found = self.prefix_cache.find(keys, key_tokens)
        if found is None:
            return self._later(None) if self.slow else None
        tokens, tables = found
        run = PinnedPrefix(given_block_ids([[kept.block for kept in table] for table in tables]), tokens)
        blocks = [kept for table in tables for kept in table]
        self.pins.update(kept.block for kept in blocks)
        pinned = self.runs[id(run)] = SimPinned(run, blocks, known=not self.slow)
        self.prefix_cache.simulation.on_pin(engine)
        engine.note("pins", [kept.block for kept in blocks], "of rank", self.rank.index)
        return self._later(pinned) if self.slow else run

    async def _later(self, pinned: SimPinned | None) -> PinnedPrefix | None:
        simulation = self.prefix_cache.simulation
        await simulation.pass_time(simulation.rng.expovariate(1 / _SLOW_S))
        if pinned is None:
            return None
        pinned.known = True
        return pinned.run

    def unpin(self, run: PinnedPrefix) -> None:
        engine, pinned = self.prefix_cache.engine, self.runs.pop(id(run), None)
        if pinned is None or pinned.run is not run:
            engine.fail("I9", f"{run} is unpinned, but it is not pinned (any more)")
            return
        for kept in pinned.blocks:
            self.pins[kept.block] -= 1
            if self.rank.uses[kept.block] > self.pins[kept.block]:
                engine.fail("I9", f"block {kept.block} is unpinned, and its lease is open")
        engine.note("unpins", [kept.block for kept in pinned.blocks], "of rank", self.rank.index)

    @property
    def left(self) -> int:
        """Number of pinned prefixes that the runtime has got and not unpinned."""
        return sum(pinned.known for pinned in self.runs.values())


class SimPrefixCache:
    """All blocks that an engine keeps during one registration of its cache."""

    def __init__(self, engine: SimEngine) -> None:
        self.simulation = engine.simulation
        self.engine = engine
        self.ranks: list[RankPrefixCache] = []
        self.writing = 0
        """Number of prompts that the device has yet to write."""
        self._kept: dict[tuple[int, Path], Kept] = {}
        self._paths: dict[bytes, Path] = {}
        self.prompts: list[SimPrompt] = []
        """All prompts that the cache has had blocks of, the last one last."""

    # --- shared

    def share(self) -> None:
        """Share the prefix cache on all ranks. Their caches have to be registered."""
        rng = self.simulation.rng
        blocks = self.engine.shape.num_blocks
        slow, most = rng.random() < _SLOW_SHARE, rng.choice((None, blocks // 2, 2 * blocks))
        for rank in self.engine.ranks:
            cache = RankPrefixCache(self, rank, slow)
            try:
                cache.share(most)
            except RuntimeUnavailable:  # the runtime drains or closes
                return
            self.ranks.append(cache)

    def find(self, keys: Sequence[bytes], key_tokens: int) -> tuple[int, list[list[Kept]]] | None:
        """Return the number of tokens of the longest prefix that is here whole, and its blocks by group; else None."""
        for at in reversed(range(len(keys))):
            path, tokens = self._paths.get(keys[at]), (at + 1) * key_tokens
            if path is not None and len(path[1]) == tokens and (tables := self._tables(path)) is not None:
                return tokens, tables
        return None

    def _tables(self, path: Path) -> list[list[Kept]] | None:
        salt, tokens = path
        tables = []
        for group, facts in enumerate(self.engine.facts):
            if facts.whole and len(tokens) % facts.block_size:
                return None
            table = [self._kept.get((group, (salt, tokens[:end]))) for end in ends(facts, len(tokens))]
            weights = self.engine.weights
            whole = [kept for kept in table if kept is not None and kept.written and kept.weights == weights]
            if len(whole) < len(table):
                return None
            tables.append(whole)
        return tables

    def pinned(self, rank: SimRank, block: int) -> bool:
        """Return True if `rank` has pinned `block` for a reader."""
        return any(one.pins[block] > 0 for one in self.ranks if one.rank is rank)

    def leases(self, rank: SimRank) -> list[Lease]:
        """Return the open leases of prefixes on `rank`."""
        return [lease for one in self.ranks if one.rank is rank for lease in one.leases if not lease.done]

    @property
    def busy(self) -> bool:
        """True while a block is pinned or being written."""
        return self.writing > 0 or any(one.runs for one in self.ranks)

    @property
    def waits(self) -> bool:
        """True while the device writes, or an answer is late."""
        return self.writing > 0 or any(not run.known for one in self.ranks for run in one.runs.values())

    def check_left(self, rank: SimRank) -> None:
        """Check that a rank without a registered cache has nothing pinned for readers."""
        for one in self.ranks:
            if one.rank is rank and one.left and not one.slow:  # late answers are unpinned a little later
                self.engine.fail("I9", f"{one.left} runs are pinned for readers of a cache that is unregistered")

    def clear(self) -> None:
        """Check that nothing is pinned, and evict all blocks."""
        for one in self.ranks:
            if one.runs:
                self.engine.fail("I9", f"{len(one.runs)} runs are pinned when all is quiet")
            if one.sharing is not None and one.sharing.pinned_blocks:
                self.engine.fail("I9", f"{one.sharing.pinned_blocks} blocks count as pinned when all is quiet")
        for kept in list(self._kept.values()):
            self._evict(kept)

    # --- filled

    async def compute(self, prompt: SimPrompt) -> None:
        """Compute the missing blocks of a prompt. Once the device has written them, they can be found."""
        engine, content, made = self.engine, self.simulation.prompts.content(prompt, self.engine.weights), list[Kept]()
        for group, facts in enumerate(engine.facts):
            for end in ends(facts, len(prompt.tokens)):
                path = prompt.path(end)
                if (group, path) not in self._kept and (table := engine.take_counts([1])):
                    made.append(self.keep(group, path, table[0][0]))
        self.learn(prompt)

        def write(rank: SimRank) -> None:
            for kept in made:
                tables = [[kept.block] if at == kept.group else [] for at in range(len(engine.facts))]
                rank.cache.write(content, len(kept.path[1]), tables)

        engine.note("computes", len(prompt.tokens), [kept.block for kept in made])
        works = [engine.later(partial(write, rank)) for rank in engine.ranks]
        self.writing += 1
        await all_over(works)
        self.writing -= 1
        for kept in made:
            kept.written = True

    def learn(self, prompt: SimPrompt) -> None:
        """Remember the keys of a prompt."""
        self.prompts.append(prompt)
        for at, key in enumerate(prompt.keys(SPAN)):
            self._paths[key] = prompt.path((at + 1) * SPAN)
            self.simulation.prompt_of_key[key] = prompt.cut((at + 1) * SPAN)

    def has(self, group: int, path: Path) -> bool:
        return (group, path) in self._kept

    def keep(self, group: int, path: Path, block: int) -> Kept:
        """Add `block` to the prefix cache, as the end of the prefix `path`."""
        kept = self._kept[group, path] = Kept(group, path, block, self.engine.weights)
        self.engine.owners[block] = kept
        return kept

    # --- emptied

    def make_room(self, count: int) -> None:
        """Free up to `count` blocks. If too few can be evicted, take back blocks that are pinned for readers."""
        free = self._evict_some(count)
        if free < count:
            self.reclaim(count - free)
            self._evict_some(count - free)

    def reclaim(self, count: int) -> None:
        """Take back blocks that are pinned for readers, up to `count` on each rank."""
        for one in self.ranks:
            if one.sharing is not None:
                before = sum(pins > 0 for pins in one.pins.values())
                told = one.sharing.reclaim(count)
                freed = before - sum(pins > 0 for pins in one.pins.values())
                if told != freed and not one.slow:
                    self.engine.fail("I9", f"reclaim has freed {told} blocks, by unpin {freed}")
                self.simulation.count(f"prefix: {'reclaimed' if freed else 'nothing to reclaim'}")

    def evict(self, share: float) -> None:
        """Evict a random `share` of the blocks that may be evicted."""
        for kept in list(self._free()):
            if self.simulation.rng.random() < share:
                self._evict(kept)

    def _evict_some(self, count: int) -> int:
        able = list(self._free())
        chosen = self.simulation.rng.sample(able, min(count, len(able)))
        for kept in chosen:
            self._evict(kept)
        return len(chosen)

    def _free(self) -> Iterator[Kept]:
        """Return the blocks that may be evicted: written, and not pinned."""
        pinned = {block for one in self.ranks for block, pins in one.pins.items() if pins > 0}
        return (kept for kept in self._kept.values() if kept.written and kept.block not in pinned)

    def _evict(self, kept: Kept) -> None:
        del self._kept[kept.group, kept.path]
        self.engine.give_back(kept)


def ends(facts: GroupFacts, tokens: int) -> Sequence[int]:
    """Return the ends, in tokens, of a group's blocks that a prompt of `tokens` tokens needs."""
    if facts.kind is GroupKind.STATE:
        return (tokens,)
    size = facts.block_size
    first = facts.first_needed(tokens) // size
    return range((first + 1) * size, tokens + 1, size)
