"""Options of the bench, and the block ids that follow from them."""

from __future__ import annotations

import pytest

from kvflow.cli.bench.settings import (
    MIB,
    BenchSettings,
    Pattern,
    SettingsError,
    Transport,
    TransportChoice,
    loads_of_turn,
    make_settings,
    parse_sizes,
)


def settings(
    *,
    sizes: str = "block,1,16",
    pairs: int = 1,
    rounds: int = 3,
    pattern: Pattern = Pattern.SCATTERED,
    quick: bool = False,
) -> BenchSettings:
    return make_settings(
        transport=TransportChoice.BOTH,
        sizes=sizes,
        pairs=pairs,
        rounds=rounds,
        pattern=pattern,
        layers=8,
        kv_heads=8,
        idle_s=5.0,
        quick=quick,
    )


def test_sizes_are_sorted_and_small_ones_are_loaded_more_often() -> None:
    sizes = parse_sizes("256, 1,block", block_size_bytes=MIB // 2)
    assert [(size.label, size.blocks, size.loads_per_turn) for size in sizes] == [
        ("one block", 1, 20),
        ("1 MB", 2, 20),
        ("256 MB", 512, 1),
    ]


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5", "3", "block,,1"])
def test_sizes_that_cannot_be_measured(text: str) -> None:
    with pytest.raises(SettingsError, match="--sizes"):
        parse_sizes(text, block_size_bytes=2 * MIB)


def test_the_cache_holds_every_turn_with_its_wake_up_block() -> None:
    made = settings(sizes="block,1,16,256")
    assert made.transports == (Transport.SHM, Transport.TCP)
    assert made.shape.region_block_size_bytes == 32 << 10
    assert made.shape.block_size_bytes == MIB // 2
    assert made.shape.blocks == 512 + 1


def test_quick_is_small() -> None:
    made = settings(quick=True)
    assert made.shape.size_bytes < 64 * MIB
    assert (made.pairs, made.rounds) == (2, 2)


@pytest.mark.parametrize(("pairs", "rounds"), [(1, 1), (1, 10), (3, 3), (3, 10), (3, 12), (4, 7)])
def test_the_pairs_share_the_rounds(pairs: int, rounds: int) -> None:
    made = settings(pairs=pairs, rounds=rounds)
    shares = [made.rounds_of_pair(index) for index in range(pairs)]
    assert [index for share in shares for index in share] == list(range(rounds))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_every_pair_needs_a_round() -> None:
    with pytest.raises(SettingsError, match=r"--rounds: 2 .* --pairs 3"):
        settings(pairs=3, rounds=2)


@pytest.mark.parametrize("pattern", Pattern)
def test_a_turn_uses_no_block_twice(pattern: Pattern) -> None:
    made = settings(pattern=pattern)
    for size in made.sizes:
        loads = loads_of_turn(made, size, "round 0")
        assert [len(load.local_ids) for load in loads] == [1] + [size.blocks] * size.loads_per_turn
        for ids in ([load.local_ids for load in loads], [load.remote_ids for load in loads]):
            flat = [block_id for part in ids for block_id in part]
            assert len(set(flat)) == len(flat)
            assert set(flat) <= set(range(made.shape.blocks))
        assert len({load.request_id for load in loads}) == len(loads)


def test_turns_are_repeatable_and_differ() -> None:
    made = settings()
    size = made.sizes[-1]
    assert loads_of_turn(made, size, "round 0") == loads_of_turn(made, size, "round 0")
    assert loads_of_turn(made, size, "round 0")[1].local_ids != loads_of_turn(made, size, "round 1")[1].local_ids


def test_contiguous_blocks_follow_each_other() -> None:
    made = settings(pattern=Pattern.CONTIGUOUS)
    load = loads_of_turn(made, made.sizes[-1], "round 0")[1]
    assert list(load.remote_ids) == list(range(load.remote_ids[0], load.remote_ids[0] + len(load.remote_ids)))
