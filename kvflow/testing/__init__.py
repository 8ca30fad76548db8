"""What tests of code that uses kvflow need: engines in one process, faults and time to script, checks of the books."""

from kvflow.testing.clock import ManualClock
from kvflow.testing.pair import InprocPair, TestEngine, assert_closed, assert_quiet, inproc_pair
from kvflow.transport.inproc import InprocFaults, InprocNetwork, InprocTransport

__all__ = [
    "InprocFaults",
    "InprocNetwork",
    "InprocPair",
    "InprocTransport",
    "ManualClock",
    "TestEngine",
    "assert_closed",
    "assert_quiet",
    "inproc_pair",
]
