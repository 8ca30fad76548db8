"""vLLM on a device of another kind than CUDA: events behind its steps."""

from __future__ import annotations

import pytest
import torch

from kvflow.core.cache.regions import Device
from kvflow.transport.device.cache_device import record_event
from tests.accelerator.sides import THERE
from tests.accelerator.standin import KIND, StandIn

pytestmark = pytest.mark.usefixtures("no_blocking_calls")


def test_an_event_happens_behind_what_was_launched(standin: StandIn) -> None:
    there = torch.zeros(4, device=THERE)
    with standin.held():
        there.fill_(1.0)
        event = record_event(Device(KIND, 1))
        assert event is not None
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_where_there_are_no_events_there_is_none(standin: StandIn) -> None:
    assert record_event(Device("cpu", 0)) is None
    assert record_event(Device("xla", 0)) is None
