"""Pairs of engines, and growing leases that start without computed tokens."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from kvflow import Lease, LoadRequest, ServeRequest
from kvflow.testing import InprocCluster, InprocPair, inproc_pair
from tests.support.tests_support import PATIENT, limited

CONFIG = limited(replace(PATIENT, listen="tcp://127.0.0.1:0"), slice_bytes_max=64)
BLOCKS, TAKEN = [1, 2, 3, 5], [4, 0, 7, 6]


def pair_of(staging: str = "never", **settings: Any) -> AbstractAsyncContextManager[InprocPair]:
    world = InprocCluster().world()
    config = replace(CONFIG, staging=staging, **settings)
    return inproc_pair(config=config, producer_world=world, consumer_world=world)


def opened(pair: InprocPair, tokens: int = 16, **more: Any) -> Lease:
    """Open a lease on `BLOCKS` with no token computed yet. The blocks are set to 0."""
    for tensor in pair.producer.kv_caches.values():
        tensor[:, BLOCKS] = 0.0
    return pair.producer.runtime.serve_blocks(ServeRequest("req", BLOCKS, num_tokens=tokens, computed_tokens=0, **more))


def wanted(pair: InprocPair, lease: Lease, **more: Any) -> LoadRequest:
    return replace(pair.wanted(lease, TAKEN), **more)
