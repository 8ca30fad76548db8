"""What tests of code that uses kvflow need: engines in one process, faults and time to script, checks of the books."""

from kvflow.testing.books import assert_closed, assert_conserved, assert_quiet
from kvflow.testing.clock import LoopClock, ManualClock
from kvflow.testing.cluster import InprocCluster
from kvflow.testing.pair import CacheSize, InprocPair, NixlPair, Pair, TestEngine, inproc_pair, nixl_pair
from kvflow.testing.virtual_loop import Deadlock, VirtualLoop, new_virtual_loop, run_virtual
from kvflow.transport.inproc import InprocFaults, InprocNetwork, InprocTransport

__all__ = [
    "CacheSize",
    "Deadlock",
    "InprocCluster",
    "InprocFaults",
    "InprocNetwork",
    "InprocPair",
    "InprocTransport",
    "LoopClock",
    "ManualClock",
    "NixlPair",
    "Pair",
    "TestEngine",
    "VirtualLoop",
    "assert_closed",
    "assert_conserved",
    "assert_quiet",
    "inproc_pair",
    "new_virtual_loop",
    "nixl_pair",
    "run_virtual",
]
