"""Verified loads: bytes compared with the producer's by digests, read once more where they differ."""

from __future__ import annotations

from pairs import EnginePair

from kvflow import LeaseOutcome
from kvflow.runtime.consumer.load import Verification


async def test_a_verified_load_says_so(pair: EnginePair) -> None:
    lease = pair.offer([3, 7, 9])
    report = await pair.load(lease, [0, 1, 2], verify=True)
    pair.assert_loaded([0, 1, 2], [3, 7, 9])
    assert await lease is LeaseOutcome.READ
    assert report.verified
    assert report.verification is Verification.VERIFIED
    assert report.seconds["verify"] > 0
    assert (pair.loading.verified, pair.loading.unverified, pair.serving.digests) == (1, 0, 1)
