"""Prefixes over real NIXL, in one process: a pull beside a load, a question, many pulls at once, and nonsense asked.

A pull is a round trip on the side channel, an ordinary load, and a look at the seal after its last byte. It stands
beside a load of the same block and a question for what is not there, in turns.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import uvloop

from kvflow import Config, LoadRequest, ServeRequest
from kvflow.core.protocol import codec, messages
from kvflow.prefix import Prefixes, PrefixRequest, SharedPrefixes, prefix_keys
from kvflow.prefix.seek_request import SeekRequest
from kvflow.prefix.testing import FakePrefixCache
from kvflow.runtime.world import make_transport
from kvflow.testing import CacheSize
from kvflow.testing.pair import Engine, open_engine
from kvflow.transport.base import Transport
from tests.bench.clocks import loop_ticker
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.targets import at_most

_TOKENS = 16
_SIZE = CacheSize(layers=2, num_blocks=2048, block_size=_TOKENS, kv_heads=8, head_size=64)
_BASE = Config(engine_id="any", transport="nixl", drain_timeout_s=2.0)
_WARM = 10
_PATIENCE_S = 10.0
_UNKNOWN = [1] * _TOKENS
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
class PrefixPulls:
    """Measure pulls of prefixes: beside loads, the cost of a question, many at once, a million unknown keys."""

    rounds: Annotated[int, "How often a load, a question and a pull of one block take turns."] = 300
    questions: Annotated[int, "How many questions of 1,000 keys are timed."] = 100
    pulls: Annotated[int, "How many pulls of one prefix run at once, from three holders."] = 64
    prefix_blocks: Annotated[int, "Blocks of that prefix."] = 24
    unknown_keys: Annotated[int, "How many keys are asked for that nobody has."] = 1_000_000

    def sets(self) -> Sequence[RankSet]:
        return [RankSet(note="prefixes", turns=self._turns)]

    def _turns(self, _: Children) -> Iterator[Turn]:
        parts: dict[str, tuple[int, Callable[..., Coroutine[Any, Any, object]]]] = {
            "one block": (1, self._measure_one_block),
            "question": (1, self._measure_question),
            "at once": (3, self._measure_pulls_at_once),
            "nonsense": (1, self._measure_unknown_keys),
        }
        for name, (holders, measure) in parts.items():
            yield Turn(key=name, run=partial(_run_with_engines, holders, measure))

    def judge(self, samples: Samples) -> Outcome:
        (block,) = samples.of(PairedTimes)["one block"]
        (question,) = samples.of(QuestionTime)["question"]
        (many,) = samples.of(ManyPulls)["at once"]
        (nonsense,) = samples.of(Nonsense)["nonsense"]
        ratio = block.pull_s / (block.load_s + block.miss_s)
        return Outcome(
            results={"one block": [block], "question": [question], "at once": [many], "nonsense": [nonsense]},
            legend=_LEGEND,
            targets=[
                at_most("pull of one block, load + question = 1", 1.3, [(ratio, "")]),
                at_most("question of 1,000 keys, ms", 0.5, [(question.seconds * 1e3, "")]),
                at_most("pinned after all", 0.0, [(float(many.pinned + nonsense.pinned), "")]),
                at_most("lag of the holder's loop, ms", 20.0, [(nonsense.lag_s * 1e3, "")]),
            ],
        )

    async def _measure_one_block(self, reader: Engine[Transport], holder: Engine[Transport]) -> PairedTimes:
        prompt, times = list(range(_TOKENS)), []
        _share(holder, prompt, [5])
        asked, missed = _request(holder, prompt, [7]), _request(holder, [9] * _TOKENS, [8])
        for number in range(self.rounds + _WARM):
            lease = holder.runtime.serve_blocks(ServeRequest(f"{number}", [6], _TOKENS))
            load = LoadRequest(f"{number}", lease.ticket, [9])
            times.append(
                (
                    await _seconds_of(reader.runtime.load_blocks(load)),
                    await _seconds_of(_prefixes(reader).seek(missed)),
                    await _seconds_of(_prefixes(reader).pull(asked)),
                )
            )
        return PairedTimes(*(statistics.median(some) for some in zip(*times[_WARM:], strict=True)))

    async def _measure_question(self, reader: Engine[Transport], holder: Engine[Transport]) -> QuestionTime:
        times, tokens = [], list(range(1000 * _TOKENS))
        _, sharing = _share(holder, tokens, range(1000), 1000)
        await _prefixes(reader).seek(_request(holder, _UNKNOWN, []))
        incarnation = holder.runtime._supervisor.incarnation
        assert incarnation is not None, "it is registered"
        local = incarnation.host.context.local
        header = codec.our_header(local.compatibility.fingerprint())
        keys, kinds = b"".join(prefix_keys(tokens, _TOKENS)), codec.requests_with([SeekRequest])
        for number in range(self.questions):
            question = SeekRequest(
                reader="bench/0.0.0#1",
                target=local.caller,
                request_id=f"{number}",
                keys=keys,
                key_tokens=_TOKENS,
            )
            frame = codec.encode(question)
            begun_s = time.perf_counter()
            reply = incarnation.answer(header, codec.decode_request(frame, kinds), draining=False)
            assert isinstance(reply, messages.LeaseAnswer), reply
            codec.encode_frames(header, reply)
            times.append(time.perf_counter() - begun_s)
            sharing.reclaim(1000)
            await asyncio.sleep(0)
        return QuestionTime(statistics.median(times))

    async def _measure_pulls_at_once(self, reader: Engine[Transport], *holders: Engine[Transport]) -> ManyPulls:
        tokens, blocks = list(range(self.prefix_blocks * _TOKENS)), self.prefix_blocks
        prefix_caches = [_share(holder, tokens, range(blocks), blocks)[0] for holder in holders]
        keys, peers = prefix_keys(tokens, _TOKENS), [holder.runtime.address for holder in holders]
        requests = []
        for at in range(self.pulls):
            ids = list(range(at * blocks, (at + 1) * blocks))
            requests.append(PrefixRequest(f"{at}", keys, _TOKENS, ids, peers, answer_within_s=_PATIENCE_S))
        for holder in holders:
            await _prefixes(reader).seek(_request(holder, _UNKNOWN, []))
        begun_s = time.perf_counter()
        reports = await asyncio.gather(*map(_prefixes(reader).pull, requests))
        took_s = time.perf_counter() - begun_s
        assert {report.num_tokens for report in reports} == {len(tokens)}, reports
        for holder in holders:  # its leases have ended, and who waits for them has been told
            incarnation = holder.runtime._supervisor.incarnation
            assert incarnation is not None, "it is registered"
            await incarnation.serving.drained()
        await asyncio.sleep(0)
        pinned = sum(+prefix_cache.pins.total() for prefix_cache in prefix_caches)
        return ManyPulls(self.pulls, len({report.source for report in reports}), took_s, pinned)

    async def _measure_unknown_keys(self, reader: Engine[Transport], holder: Engine[Transport]) -> Nonsense:
        _, sharing = _share(holder, list(range(64 * _TOKENS)), range(64))
        lags_s: list[float] = []
        async with loop_ticker(lags_s):
            begun_s = time.perf_counter()
            for _ in range(-(-self.unknown_keys // 1000)):
                keys, peers = [secrets.token_bytes(32) for _ in range(1000)], [holder.runtime.address]
                asked = PrefixRequest("nonsense", keys, _TOKENS, [], peers, answer_within_s=_PATIENCE_S)
                assert not await _prefixes(reader).seek(asked)
            took_s = time.perf_counter() - begun_s
        return Nonsense(self.unknown_keys, took_s, max(lags_s, default=0.0), sharing.pinned_blocks)


async def _seconds_of(work: Awaitable[object]) -> float:
    begun_s = time.perf_counter()
    await work
    return time.perf_counter() - begun_s


def _prefixes(engine: Engine[Transport]) -> Prefixes:
    (found,) = (part for part in engine.runtime._supervisor.parts if isinstance(part, Prefixes))
    return found


def _share(
    holder: Engine[Transport], tokens: Sequence[int], block_ids: Sequence[int], pinned_max: int | None = None
) -> tuple[FakePrefixCache, SharedPrefixes]:
    """These tokens are in those blocks."""
    prefix_cache = FakePrefixCache(_TOKENS)
    prefix_cache.put(tokens, block_ids)
    return prefix_cache, _prefixes(holder).share(prefix_cache, pinned_blocks_max=pinned_max)


def _request(holder: Engine[Transport], tokens: Sequence[int], block_ids: list[int]) -> PrefixRequest:
    keys, peer = prefix_keys(tokens, _TOKENS), holder.runtime.address
    return PrefixRequest("one", keys, _TOKENS, block_ids, [peer], answer_within_s=_PATIENCE_S)


def _run_with_engines(holders: int, measure: Callable[..., Coroutine[Any, Any, object]]) -> object:
    """A reader and so many holders, on a loop of their own."""

    async def run() -> object:
        async with AsyncExitStack() as stack:
            opening = [
                open_engine(f"engine-{at}", _BASE, make_transport, size=_SIZE, parts=[Prefixes()])
                for at in range(holders + 1)
            ]
            engines = [await stack.enter_async_context(engine) for engine in opening]
            return await measure(*engines)

    return uvloop.run(run())
