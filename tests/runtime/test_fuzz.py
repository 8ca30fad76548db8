"""A short run of the fuzz of everything that comes from outside; `tests/fuzz/side_channel.py` runs longer ones."""

from __future__ import annotations

import pytest
from budgets import budget

from tests.fuzz.side_channel import Mode, fuzz

pytestmark = pytest.mark.timeout(600)  # passing takes seconds, on a busy machine a minute


@pytest.mark.budget
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode is Mode.UNLIMITED else pytest.mark.thorough) for mode in Mode]
)
async def test_mutants_and_noise_change_nothing_for_honest_engines(mode: Mode) -> None:
    messages = budget(1000, 3000) if mode is Mode.UNLIMITED else 1000
    report = await fuzz(messages, 7, mode)
    assert sum(report.sent.values()) > 0.9 * messages
    assert report.honest_loads >= 25
    assert report.honest_handshakes >= 2
    assert report.after.descriptors <= report.before.descriptors + 5
    assert report.after.tasks <= report.before.tasks
    assert report.after.resident_mb < report.before.resident_mb + 20
    if mode is Mode.CURVE:  # nobody without a key gets as far as a message
        assert report.listener.answered == report.honest_handshakes + 1
        assert (report.listener.refused, report.listener.dropped) == (0, 0)
        assert report.listener.rejected > 0
    else:
        assert report.listener.refused > 0
        assert report.listener.dropped > 0
        assert (report.listener.over_rate > 0) is (mode is Mode.LIMITS)
