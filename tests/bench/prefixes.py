"""Prefixes over real NIXL, in one process: a pull beside a load, a question, many pulls at once, and nonsense asked.

A pull is a round trip on the side channel, an ordinary load, and a look at the seal after its last byte. It stands
beside a load of the same block and a question for what is not there, in turns.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import uvloop

from kvflow import Config, LoadRequest, PrefixRequest, ServeRequest, prefix_keys
from kvflow.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from kvflow.bench.targets import at_most
from kvflow.core.protocol import codec, messages
from kvflow.testing import BlockShelf, CacheSize
from kvflow.testing.pair import Engine, open_engine
from kvflow.transport.base import Transport
from kvflow.transport.factory import make_transport

_TOKENS = 16
_SIZE = CacheSize(layers=2, num_blocks=2048, block_size=_TOKENS, kv_heads=8, head_size=64)
_BASE = Config(engine_id="any", transport="nixl", drain_timeout_s=2.0)
_LAG_EVERY_S = 1e-3
_PATIENCE_S = 10.0
_LEGEND = (
    "One process over NIXL. one block: medians, and the pull as a share of the load and a question for what is not "
    "there. question: time of the holder's loop for one of 1,000 keys that it all has. nonsense: keys that "
    "nobody has, 1,000 a question, and by how much a timer of the holder's loop was late at most."
)


@dataclass(frozen=True, slots=True)
class PairedTimes:
    """Seconds of one load, one question that is a miss, and one pull, of a block."""

    load_s: float
    miss_s: float
    pull_s: float


@dataclass(frozen=True, slots=True)
class QuestionTime:
    """Seconds that answering one question takes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ManyPulls:
    """Pulls of one prefix at once: how many, from how many holders, seconds for all, blocks pinned at the end."""

    pulls: int
    sources: int
    seconds: float
    pinned: int


@dataclass(frozen=True, slots=True)
class Nonsense:
    """Keys that nobody has: how many, seconds for all, the worst lag of the holder's loop, blocks pinned at the end."""

    keys: int
    seconds: float
    lag_s: float
    pinned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Measure pulls of prefixes: beside loads, the cost of a question, many at once, a million unknown keys."""

    rounds: Annotated[int, "How often a load, a question and a pull of one block take turns."] = 300
    questions: Annotated[int, "How many questions of 1,000 keys are timed."] = 100
    pulls: Annotated[int, "How many pulls of one prefix run at once, from three holders."] = 64
    prefix_blocks: Annotated[int, "Blocks of that prefix."] = 24
    unknown_keys: Annotated[int, "How many keys are asked for that nobody has."] = 1_000_000

    def sets(self) -> Sequence[RankSet]:
        return [RankSet(note="prefixes", turns=self._turns)]

    def _turns(self, _: Children) -> Iterator[Turn]:
        yield Turn(key="beside", run=partial(uvloop.run, self._beside()))
        yield Turn(key="question", run=partial(uvloop.run, self._question()))
        yield Turn(key="many", run=partial(uvloop.run, self._many()))
        yield Turn(key="nonsense", run=partial(uvloop.run, self._nonsense()))

    def judge(self, samples: Samples) -> Outcome:
        (found,) = (taken for _, (taken,) in samples.of(_Samples).items() if taken.pairs)
        question = next(taken.questions for _, (taken,) in samples.of(_Samples).items() if taken.questions)
        times = [(one.load_s, one.miss_s, one.pull_s) for one in found.pairs]
        load_s, miss_s, pull_s = (statistics.median(some) for some in zip(*times, strict=True))
        (many,) = samples.of(ManyPulls)["many"]
        (nonsense,) = samples.of(Nonsense)["nonsense"]
        question_s = statistics.median(one.seconds for one in question)
        return Outcome(
            results={
                "one block": [PairedTimes(load_s, miss_s, pull_s)],
                "question": [QuestionTime(question_s)],
                "at once": [many],
                "nonsense": [nonsense],
            },
            legend=_LEGEND,
            targets=[
                at_most("pull of one block, load + question = 1", 1.3, [(pull_s / (load_s + miss_s), "")]),
                at_most("question of 1,000 keys, ms", 0.5, [(question_s * 1e3, "")]),
                at_most("pinned after all", 0.0, [(float(many.pinned + nonsense.pinned), "")]),
                at_most("lag of the holder's loop, ms", 20.0, [(nonsense.lag_s * 1e3, "")]),
            ],
        )

    async def _beside(self) -> _Samples:
        pairs = []
        async with _engines(1) as (reader, (holder,)):
            prompt, shelf = list(range(_TOKENS)), BlockShelf(_TOKENS)
            shelf.put(prompt, [5])
            holder.runtime.share(shelf)
            asked = _request(holder, prompt, [7])
            missed = replace(_request(holder, [9] * _TOKENS, [8]), request_id="miss")
            for number in range(self.rounds + 10):
                lease = holder.runtime.serve_blocks(ServeRequest(f"{number}", [6], _TOKENS))
                load = LoadRequest(f"{number}", lease.ticket, [9])
                times = PairedTimes(
                    await _timed(lambda load=load: reader.runtime.load_blocks(load)),  # type: ignore[misc]
                    await _timed(lambda: reader.runtime.seek_prefix(missed)),
                    await _timed(lambda: reader.runtime.pull_prefix(asked)),
                )
                if number >= 10:
                    pairs.append(times)
        return _Samples(pairs=pairs)

    async def _question(self) -> _Samples:
        times, tokens = [], list(range(1000 * _TOKENS))
        async with _engines(1) as (reader, (holder,)):
            shelf = BlockShelf(_TOKENS)
            shelf.put(tokens, range(1000))
            sharing = holder.runtime.share(shelf, pinned_blocks_max=1000)
            await reader.runtime.seek_prefix(_request(holder, [1] * _TOKENS, []))
            cache = holder.runtime._supervisor.cache
            assert cache is not None, "it is registered"
            header = codec.our_header(cache.local.compatibility.fingerprint())
            keys = b"".join(prefix_keys(tokens, _TOKENS))
            for number in range(self.questions):
                question = messages.SeekRequest(
                    reader="bench/0.0.0#1",
                    target=cache.local.caller.target,
                    request_id=f"{number}",
                    keys=keys,
                    key_tokens=_TOKENS,
                )
                frame = codec.encode(question)
                begun_s = time.perf_counter()
                reply = cache.answer(header, codec.decode_request(frame), draining=False)
                assert isinstance(reply, messages.Offer), reply
                codec.encode_frames(header, reply)
                times.append(QuestionTime(time.perf_counter() - begun_s))
                sharing.reclaim(1000)
                await asyncio.sleep(0)
        return _Samples(questions=times)

    async def _many(self) -> ManyPulls:
        tokens, blocks = list(range(self.prefix_blocks * _TOKENS)), self.prefix_blocks
        async with _engines(3) as (reader, holders):
            shelves = [BlockShelf(_TOKENS) for _ in holders]
            for holder, shelf in zip(holders, shelves, strict=True):
                shelf.put(tokens, range(blocks))
                holder.runtime.share(shelf, pinned_blocks_max=blocks)
            peers = [holder.runtime.address for holder in holders]
            keys = prefix_keys(tokens, _TOKENS)
            requests = [
                PrefixRequest(
                    f"{at}",
                    keys,
                    _TOKENS,
                    list(range(at * blocks, (at + 1) * blocks)),
                    peers,
                    answer_within_s=_PATIENCE_S,
                )
                for at in range(self.pulls)
            ]
            for holder in holders:
                await reader.runtime.seek_prefix(_request(holder, [1] * _TOKENS, []))
            begun_s = time.perf_counter()
            reports = await asyncio.gather(*map(reader.runtime.pull_prefix, requests))
            took_s = time.perf_counter() - begun_s
            assert {report.num_tokens for report in reports} == {len(tokens)}, reports
            await _unpinned(holders)
            pinned = sum(+shelf.pins.total() for shelf in shelves)
        return ManyPulls(self.pulls, len({report.source for report in reports}), took_s, pinned)

    async def _nonsense(self) -> Nonsense:
        async with _engines(1) as (reader, (holder,)):
            shelf = BlockShelf(_TOKENS)
            shelf.put(list(range(64 * _TOKENS)), range(64))
            sharing = holder.runtime.share(shelf)
            lag = asyncio.ensure_future(_lag())
            begun_s = time.perf_counter()
            for number in range(-(-self.unknown_keys // 1000)):
                asked = replace(
                    _request(holder, [1] * _TOKENS, []),
                    request_id=f"{number}",
                    keys=[secrets.token_bytes(32) for _ in range(1000)],
                    answer_within_s=_PATIENCE_S,
                )
                assert not await reader.runtime.seek_prefix(asked)
            took_s = time.perf_counter() - begun_s
            lag.cancel()
            await asyncio.wait([lag])
            return Nonsense(self.unknown_keys, took_s, max(_LAGS, default=0.0), sharing.pinned_blocks)


_LAGS: list[float] = []


async def _lag() -> None:
    """By how much a timer is late, until cancelled."""
    loop = asyncio.get_running_loop()
    _LAGS.clear()
    while True:
        due_s = loop.time() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        _LAGS.append(loop.time() - due_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    pairs: list[PairedTimes] = field(default_factory=list)
    questions: list[QuestionTime] = field(default_factory=list)


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    begun_s = time.perf_counter()
    await work()
    return time.perf_counter() - begun_s


async def _unpinned(holders: Sequence[Engine[Transport]]) -> None:
    """Wait until every holder's leases have ended, and who waits for them has been told."""
    for holder in holders:
        cache = holder.runtime._supervisor.cache
        assert cache is not None, "it is registered"
        await cache.serving.drained()
    await asyncio.sleep(0)


def _request(holder: Engine[Transport], tokens: Sequence[int], block_ids: list[int]) -> PrefixRequest:
    keys, peer = prefix_keys(tokens, _TOKENS), holder.runtime.address
    return PrefixRequest("one", keys, _TOKENS, block_ids, [peer], answer_within_s=_PATIENCE_S)


@asynccontextmanager
async def _engines(holders: int) -> AsyncIterator[tuple[Engine[Transport], list[Engine[Transport]]]]:
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(open_engine(f"engine-{number}", _BASE, make_transport, size=_SIZE))
            for number in range(holders + 1)
        ]
        yield made[0], made[1:]
