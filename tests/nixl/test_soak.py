"""A short soak: what two engines hold does not grow with the number of loads. `soak.py` does the long ones."""

from __future__ import annotations

import pytest
from engine_process import Engines
from soak import BATCH_SIZE, soak

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

WARM_UP, BATCHES = 3, 9
RSS_GROWTH_BYTES_MAX = 8 << 20


@pytest.mark.thorough
def test_nothing_grows(engines: Engines) -> None:
    """Thorough: see `test_mutants_and_noise_change_nothing_for_honest_engines` of `runtime/test_fuzz.py`."""
    samples = soak(engines, 1, sample_every=WARM_UP)
    before = next(samples)
    after = next(sample for sample in samples if sample.loads >= BATCHES * BATCH_SIZE)
    assert set(after.endings) <= {"loaded", "cancelled", "LeaseExpired"}, after.endings
    assert after.endings["loaded"] > after.loads // 2
    for name in ("producer", "consumer"):
        old, new = getattr(before, name), getattr(after, name)
        grown_bytes = new.pop("rss_bytes") - old.pop("rss_bytes")
        assert new == old, name
        assert grown_bytes < RSS_GROWTH_BYTES_MAX, name
