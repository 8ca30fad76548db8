"""`python3 dev.py bench fairness`: the blocks of a round, and its arithmetic."""

from __future__ import annotations

from itertools import chain

import pytest

from kvflow.bench.loads import MIB, SettingsError
from tests.bench.fairness import Fairness, Round, summarize
from tests.bench.scenario import Samples
from tests.bench.targets import Verdict


def test_the_loads_of_a_round_share_no_block() -> None:
    scenario = Fairness(size=64, huge_loads=2)
    loads = scenario.loads_of_round(1)
    for ids in ("local_ids", "remote_ids"):
        flat = [block for load in chain(*loads.values()) for block in getattr(load, ids)]
        assert len(set(flat)) == len(flat) == scenario.shape.blocks
    sizes = {kind: [len(load.local_ids) * scenario.shape.block_size_bytes for load in loads[kind]] for kind in loads}
    assert (sizes["huge"], sizes["slice"]) == ([64 * MIB] * 2, [8 * MIB] * 3)
    assert {len(load.local_ids) for load in (*loads["alone"], *loads["behind"])} == {1}
    assert scenario.loads_of_round(1) == loads != scenario.loads_of_round(2)


def test_a_huge_load_has_at_least_two_slices() -> None:
    with pytest.raises(SettingsError, match=r"--size: 8 MB .* less than two slices, which have 16777216"):
        Fairness(size=8).sets()


def verdict(*rounds: Round) -> Verdict:
    samples = Samples()
    for one in rounds:
        samples.add("round", one)
    (row,) = Fairness().judge(samples).targets
    return row.verdict


def test_the_delay_is_a_ratio_within_each_round() -> None:
    quiet = Round(alone_s=(1.0, 1.0, 1.0), slice_s=(4.0,), huge_s=(40.0,), behind_s=(3.0, 5.0))
    slow = Round(alone_s=(2.0, 2.0, 9.0), slice_s=(8.0,), huge_s=(80.0,), behind_s=(6.0, 10.0))
    loads, delay = summarize([quiet, slow, quiet])
    assert (delay.p50, delay.p99) == (0.5, 1.0)
    alone, behind, one_slice, huge = (kind.load_s for kind in loads)
    assert (alone.samples, alone.p50, alone.max) == (9, 1.0, 9.0)
    assert (behind.samples, behind.p99, one_slice.p50, huge.max) == (6, 10.0, 4.0, 80.0)
    assert verdict(quiet, slow, quiet) is Verdict.PASS
    assert verdict(Round(alone_s=(1.0,), slice_s=(4.0,), huge_s=(40.0,), behind_s=(10.0,))) is Verdict.FAIL
