"""The bench `verifying`: the sizes that follow from its options, its loads, and from loads to rows and a verdict."""

from __future__ import annotations

import pytest

from kvflow.bench.child import BenchError
from kvflow.bench.loads import SettingsError
from tests.bench.consumers import LoadResult
from tests.bench.scenario import Samples
from tests.bench.targets import Verdict
from tests.bench.verifying import Verifying

MIB = 1 << 20
SCENARIO = Verifying(sizes="16,1", rounds=2, layers=8)


@pytest.mark.parametrize("sizes", ["", "one", "0", "16,", "3.5", "-1"])
def test_sizes_that_cannot_be_measured(sizes: str) -> None:
    with pytest.raises(SettingsError, match="--sizes: "):
        Verifying(sizes=sizes).sets()


def test_both_loads_of_a_round_move_the_same_blocks() -> None:
    assert SCENARIO.blocks == {"1 MB": 2, "16 MB": 32}
    plain, verified = (SCENARIO.planned("16 MB", f"round 0 {verify}") for verify in (False, True))
    assert plain.request_id != verified.request_id
    assert (plain.local_ids, plain.remote_ids) == (verified.local_ids, verified.remote_ids)
    assert len(set(plain.local_ids)) == 32
    assert max(plain.local_ids) < SCENARIO.shape.blocks == 36


def samples(verified_s: float, checked_bytes: int = 16 * MIB) -> Samples:
    found = Samples()
    for size, size_bytes in (("1 MB", MIB), ("16 MB", checked_bytes)):
        for verify in (False, True):
            found.add((size, verify), LoadResult(9.0, size_bytes, 1, size_bytes))
            for _ in range(2):
                found.add((size, verify), LoadResult(verified_s if verify else 1.0, size_bytes, 1, 1))
    return found


@pytest.mark.parametrize(("verified_s", "verdict"), [(1.9, Verdict.PASS), (2.1, Verdict.FAIL)])
def test_large_loads_have_to_keep_half_of_their_speed(verified_s: float, verdict: Verdict) -> None:
    outcome = SCENARIO.judge(samples(verified_s))
    (row,) = outcome.targets
    assert (row.verdict, row.where) == (verdict, "16 MB")
    assert row.measured == pytest.approx(1 / verified_s)


def test_a_first_load_that_was_not_compared_as_a_whole_is_an_error() -> None:
    with pytest.raises(BenchError, match="16 MB: 5 bytes compared"):
        SCENARIO.judge(samples(1.0, checked_bytes=5))
