"""`dev.py bench transfer`: its options, the blocks that follow from them, a reader's turn, the thread of (d)."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import types
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pytest

from kvflow.bench.cache import BenchCache, WrongBytes
from kvflow.bench.child import Child
from kvflow.bench.loads import MIB, Fabric, SettingsError
from kvflow.bench.raw import AgentAddress, TunedAgent
from kvflow.transport.nixl.defaults import backend_params
from tests.bench.scenario import SpinningRank
from tests.bench.transfer.ranks import BlockingReader, Contender, ReaderRank, ThreadHopReader, TurnResult
from tests.bench.transfer.raw import RawAgent
from tests.bench.transfer.scenario import Transfer, ranks_of
from tests.bench.transfer.sizes import loads_of_turn
from tests.bench.transfer.turns import pair_of, rounds_of_pair


class Bindings:
    """NIXL, as far as a raw agent is made."""

    def __init__(self) -> None:
        self.created: dict[str, dict[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self

    def createBackend(self, name: str, params: dict[str, str]) -> str:  # noqa: N802 - NIXL's name
        self.created[name] = params
        return name


@pytest.mark.parametrize("contender", [Contender.TUNED, Contender.HOP])
def test_raw_nixl_at_its_best_has_every_parameter_that_kvflow_gives_its_backends(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over tcp the size of UCX's frames alone makes a factor."""
    for rank in ranks_of(contender, SMALL.shape, "UCX,LIBFABRIC"):
        assert isinstance(rank.open_rank, partial)
        bindings = Bindings()
        nixl = types.ModuleType("nixl")
        nixl._bindings = bindings  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nixl", nixl)
        TunedAgent("reader", BenchCache(SMALL.shape), rank.open_rank.args[1], producer=False)
        assert bindings.created == {name: backend_params(name, {}) for name in ("UCX", "LIBFABRIC")}
        assert "TCP_TX_SEG_SIZE=64k" in bindings.created["UCX"]["engine_config"]


SMALL = Transfer(sizes="1", layers=2)


def test_sizes_are_sorted_and_small_ones_are_loaded_more_often() -> None:
    sizes = Transfer(sizes="256, 1,block").load_sizes
    assert [(size.label, size.blocks, size.loads_per_turn) for size in sizes] == [
        ("one block", 1, 20),
        ("1 MB", 2, 20),
        ("256 MB", 512, 1),
    ]


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5", "3", "block,,1", "x1", "0x1", "-1x1", "2x", "1.5x1"])
def test_sizes_that_cannot_be_measured(text: str) -> None:
    with pytest.raises(SettingsError, match="--sizes"):
        Transfer(sizes=text, layers=32).sets()


def test_loads_at_once_are_a_size() -> None:
    """64x1: a turn has twice 64 loads of 1 MB, and takes two times."""
    sizes = Transfer(sizes="64x1,64,4xblock").load_sizes
    assert [(size.label, size.blocks, size.loads_per_turn, size.at_once) for size in sizes] == [
        ("4 x one block", 1, 80, 4),
        ("64 MB", 128, 2, 1),
        ("64 x 1 MB", 2, 128, 64),
    ]
    assert [size.timed_blocks for size in sizes] == [4, 128, 128]


def test_the_cache_holds_every_turn_with_its_wake_up_block() -> None:
    scenario = Transfer(sizes="block,1,16,256")
    assert scenario.transports == (Fabric.SHM, Fabric.TCP)
    assert scenario.shape.region_block_size_bytes == 32 << 10
    assert scenario.shape.block_size_bytes == MIB // 2
    assert scenario.shape.blocks == 512 + 1


@pytest.mark.parametrize(("pairs", "rounds"), [(1, 1), (1, 10), (3, 3), (3, 10), (3, 12), (4, 7)])
def test_the_pairs_share_the_rounds(pairs: int, rounds: int) -> None:
    shares = [rounds_of_pair(rounds, pairs, index) for index in range(pairs)]
    assert [index for share in shares for index in share] == list(range(rounds))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    with pytest.raises(SettingsError, match=rf"--rounds: {pairs - 1} .* --pairs {pairs}"):
        Transfer(pairs=pairs, rounds=pairs - 1).sets()


def test_a_turn_uses_no_block_twice() -> None:
    scenario = Transfer(sizes="block,1,16")
    for size in scenario.load_sizes:
        loads = loads_of_turn(size, "round 0", scenario.shape.blocks)
        assert [len(load.local_ids) for load in loads] == [1] + [size.blocks] * size.loads_per_turn
        for ids in ([load.local_ids for load in loads], [load.remote_ids for load in loads]):
            flat = [block_id for part in ids for block_id in part]
            assert len(set(flat)) == len(flat)
            assert set(flat) <= set(range(scenario.shape.blocks))
        assert len({load.request_id for load in loads}) == len(loads)
        assert (
            loads_of_turn(size, "round 0", scenario.shape.blocks)
            == loads
            != loads_of_turn(size, "round 1", scenario.shape.blocks)
        )


def test_each_pair_of_each_contender_has_its_turns_and_the_spinning_one_rests() -> None:
    scenario = Transfer(sizes="block,1", pairs=2, rounds=5)
    found = Counter[object]()
    for ranks in scenario.sets():
        assert [rank.name for rank in ranks.ranks if isinstance(rank, SpinningRank)] == [
            "raw_example producer",
            "raw_example reader",
        ]
        children = {rank.name: cast(Child, rank.name) for rank in ranks.ranks}
        for turn in ranks.turns(children):
            found[turn.key] += 1
            if isinstance(turn.key, tuple):
                assert set(turn.children) == set(pair_of(turn.key[2], children))
    sizes = scenario.load_sizes
    for transport in Fabric:
        assert {found[transport, size, name, 0] for size in sizes for name in Contender} == {2}
        assert {found[transport, size, name, 1] for size in sizes for name in Contender} == {3}
    assert found["check"] == 2 * 2 * len(sizes) * len(Contender)


# --- a reader's turn


class Copying:
    """Moves blocks inside this process: all blocks, or all but the last."""

    def __init__(self, target: BenchCache, *, left_out: int) -> None:
        self._source = BenchCache(target.shape)
        self._source.fill()
        self._target = target
        self._left_out = left_out

    def address(self) -> AgentAddress:
        return AgentAddress()

    def connect(self, address: AgentAddress) -> None: ...

    def load(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        count = len(local_ids) - self._left_out
        self._target.layers[:, :, local_ids[:count]] = self._source.layers[:, :, remote_ids[:count]]

    def take_notifications(self) -> None: ...


async def take_turn(*, left_out: int, check_all: bool, at_once: int = 1) -> TurnResult:
    cache = BenchCache(SMALL.shape)
    reader = ReaderRank(cache, BlockingReader(Copying(cache, left_out=left_out)))
    await reader.connect(AgentAddress(), os.getpid())
    return await reader.turn(
        loads_of_turn(SMALL.load_sizes[0], "any", SMALL.shape.blocks), [], check_all=check_all, at_once=at_once
    )


async def test_a_turn_times_all_loads_but_the_first_and_compares_blocks_of_each() -> None:
    result, sampled = [await take_turn(left_out=0, check_all=check_all) for check_all in (True, False)]
    (size,) = SMALL.load_sizes
    blocks = 1 + size.loads_per_turn * size.blocks
    assert (len(result.seconds), result.cpu_s > 0) == (size.loads_per_turn, True)
    assert result.checked_bytes == blocks * SMALL.shape.block_size_bytes
    assert 0 < sampled.checked_bytes <= result.checked_bytes


async def test_loads_at_once_are_timed_as_one() -> None:
    (size,) = SMALL.load_sizes
    result = await take_turn(left_out=0, check_all=True, at_once=size.loads_per_turn // 4)
    assert len(result.seconds) == 4
    assert result.checked_bytes == (1 + size.loads_per_turn * size.blocks) * SMALL.shape.block_size_bytes


@pytest.mark.parametrize("check_all", [True, False])
async def test_a_contender_that_moves_wrong_bytes_is_found(check_all: bool) -> None:
    with pytest.raises(WrongBytes, match="of the producer"):
        await take_turn(left_out=1, check_all=check_all)


# --- the thread of contender (d)


async def test_jobs_run_in_order_on_one_other_thread() -> None:
    """And an error is raised where the job was handed over, and ends nothing."""
    hop, ran = ThreadHopReader(cast(RawAgent, None)), list[tuple[int, int]]()
    with pytest.raises(ZeroDivisionError):
        await hop.call(lambda: cast(None, 1 // 0))
    await asyncio.gather(*(hop.call(lambda i=i: ran.append((i, threading.get_ident()))) for i in range(3)))
    hop.close()
    assert [index for index, _ in ran] == [0, 1, 2]
    assert len({ident for _, ident in ran} | {threading.get_ident()}) == 2
