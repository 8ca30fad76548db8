"""Tools for testing engines that use kvflow: runtimes in one process, scripted faults, virtual time, safety checks."""

from kvflow.runtime.world import World
from kvflow.testing.accounting import assert_closed, assert_conserved, assert_quiet
from kvflow.testing.block_watch import BlockWatch, watch_blocks
from kvflow.testing.caches import PatternCache, StateCache
from kvflow.testing.cancel import cancel_everywhere
from kvflow.testing.cluster import InprocCluster
from kvflow.testing.comparing import assert_blocks_equal, assert_loaded, compare_blocks
from kvflow.testing.load_watch import LoadWatch, watch_loads
from kvflow.testing.network_conditions import NetworkConditions
from kvflow.testing.offer_watch import OfferWatch, watch_offers
from kvflow.testing.pair import (
    CacheSize,
    InprocPair,
    NixlPair,
    Pair,
    TestEngine,
    block_by_block,
    inproc_pair,
    nixl_pair,
)
from kvflow.testing.virtual_clock import LoopClock, ManualClock
from kvflow.testing.virtual_loop import Deadlock, VirtualLoop, new_virtual_loop, run_virtual
from kvflow.transport.inproc import InprocFaults, InprocNetwork, InprocTransport

__all__ = [
    "BlockWatch",
    "CacheSize",
    "Deadlock",
    "InprocCluster",
    "InprocFaults",
    "InprocNetwork",
    "InprocPair",
    "InprocTransport",
    "LoadWatch",
    "LoopClock",
    "ManualClock",
    "NetworkConditions",
    "NixlPair",
    "OfferWatch",
    "Pair",
    "PatternCache",
    "StateCache",
    "TestEngine",
    "VirtualLoop",
    "World",
    "assert_blocks_equal",
    "assert_closed",
    "assert_conserved",
    "assert_loaded",
    "assert_quiet",
    "block_by_block",
    "cancel_everywhere",
    "compare_blocks",
    "inproc_pair",
    "new_virtual_loop",
    "nixl_pair",
    "run_virtual",
    "watch_blocks",
    "watch_loads",
    "watch_offers",
]
