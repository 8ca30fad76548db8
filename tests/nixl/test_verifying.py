"""Verified loads over real NIXL: a byte of the producer that changes after it was read is found by digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvflow.errors import ChecksumMismatch
from kvflow.runtime.load.requests import Verification
from kvflow.testing import nixl_pair
from kvflow.verify.digest_request import DigestRequest

pytestmark = pytest.mark.nixl


class Flipping:
    """Flips bytes of the producer's block 7 before each of the first `times` questions for digests."""

    def __init__(self, peers: Any, kv_caches: Mapping[str, torch.Tensor], times: int) -> None:
        self._ask = peers.ask
        peers.ask = self._asking
        self._tensor = next(iter(kv_caches.values()))
        self._times = times

    async def _asking(self, peer: Any, question: Any, *kinds: Any, **options: Any) -> Any:
        if self._times and isinstance(question, DigestRequest):
            self._times -= 1
            self._tensor[0, 7].view(torch.uint8)[..., -1:] ^= 0x10
        return await self._ask(peer, question, *kinds, **options)


@pytest.mark.parametrize("times", [0, 1, 2])
async def test_what_changes_between_read_and_digest_is_found(times: int) -> None:
    async with nixl_pair() as pair:
        lease, consumer = pair.offer([3, 7]), pair.consumer.runtime
        host: Any = consumer._supervisor.require_host()
        _ask_after_the_read(host.optional.verify("a test"))
        Flipping(host.peers, pair.producer.kv_caches, times)
        verified = replace(pair.wanted(lease, [0, 1]), verify=True)
        if times == 2:
            with pytest.raises(ChecksumMismatch):
                await consumer.load_blocks(verified)
            lease.revoke()
        else:
            report = await consumer.load_blocks(verified)
            assert report.verification is (Verification.REPAIRED if times else Verification.VERIFIED)
            pair.assert_loaded([0, 1], [3, 7])
        await lease


def _ask_after_the_read(verifying: Any) -> None:
    """As if the blocks had been staged: else the questions come while they are read."""
    parts = verifying.parts_to_compare

    def later(read: Any, tables: Any) -> Any:
        read.proof.grows = True
        return parts(read, tables)

    verifying.parts_to_compare = later
