"""Faults by seed on a cluster of engines that are not the simulator's: the toy engine of the examples."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from toy_engine import Engine

from kvflow.errors import KVFlowError, PeerUnreachable, UsageError
from kvflow.testing import InprocCluster, NetworkConditions, run_virtual

PROMPT = [11, 12, 13, 14, 15, 16]


async def hand_over(cluster: InprocCluster) -> tuple[str, float]:
    """How it ended, and when; every block has to come back."""
    prefill, decode = Engine("prefill", world=cluster.world()), Engine("decode", world=cluster.world())
    async with prefill, decode:
        try:
            assert await decode.decode("request", prefill.prefill("request", PROMPT), len(PROMPT)) == PROMPT
            ended = "right"
        except KVFlowError as error:
            ended = type(error).__name__
    for engine in (prefill, decode):
        assert sorted(engine.free) == list(range(engine.num_blocks))
    return ended, asyncio.get_running_loop().time()


def test_a_seed_is_the_same_every_time_and_seeds_differ() -> None:
    ends = [run_virtual(hand_over(InprocCluster(seed=seed))) for seed in range(30)]
    assert ends == [run_virtual(hand_over(InprocCluster(seed=seed))) for seed in range(30)]
    counts = Counter(ended for ended, _ in ends)
    assert 15 < counts["right"] < 30, counts
    assert len({time_s for _, time_s in ends}) > 25


def test_network_conditions_can_be_given() -> None:
    assert run_virtual(hand_over(InprocCluster(seed=1, conditions=NetworkConditions(torn_share=1.0))))[0] == "right"
    unanswered = NetworkConditions(unanswered_share=1.0)
    assert run_virtual(hand_over(InprocCluster(seed=1, conditions=unanswered)))[0] == PeerUnreachable.__name__


@pytest.mark.parametrize("seed", range(10))
def test_an_engine_that_crashes_loads_in_its_next_life(seed: int) -> None:
    async def main() -> None:
        cluster = InprocCluster(seed=seed, conditions=NetworkConditions(read_s=0.01))
        lives = []

        async def decode() -> list[int]:
            async with Engine("decode", world=cluster.world()) as engine:
                lives.append(engine)
                return await engine.decode("request", ticket, len(PROMPT))

        async with Engine("prefill", world=cluster.world()) as prefill:
            ticket = prefill.prefill("request", PROMPT)
            assert await cluster.run_process("decode", decode, crashes=3, within_s=0.01) == PROMPT
        assert 1 <= len(lives) <= 4
        assert sorted(prefill.free) == list(range(prefill.num_blocks))

    run_virtual(main())


def test_a_producer_that_crashes_gives_its_readers_an_error_and_comes_back() -> None:
    async def main() -> None:
        cluster = InprocCluster(seed=5, conditions=NetworkConditions(read_s=0.5))
        tickets = asyncio.Queue[dict[str, Any]]()

        async def prefill() -> None:
            async with Engine("prefill", world=cluster.world()) as engine:
                tickets.put_nowait(engine.prefill("request", PROMPT))
                await asyncio.Event().wait()

        producing = asyncio.create_task(cluster.run_process("prefill", prefill))
        async with Engine("decode", world=cluster.world()) as decode:
            with pytest.raises(KVFlowError):
                await decode.decode("request", await tickets.get(), len(PROMPT))
            assert await decode.decode("request", await tickets.get(), len(PROMPT)) == PROMPT
        producing.cancel()
        await asyncio.wait([producing])
        assert producing.cancelled()

    run_virtual(main())


async def test_faults_by_seed_need_virtual_time() -> None:
    with pytest.raises(UsageError, match="run_virtual"):
        async with InprocCluster(seed=1).engine("prefill"):
            pass


async def test_crashes_need_a_seed() -> None:
    with pytest.raises(UsageError, match="seed"):
        await InprocCluster().run_process("decode", lambda: asyncio.sleep(0))
