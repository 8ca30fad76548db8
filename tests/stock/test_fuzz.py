"""A short run of the fuzz of a port that both kinds of readers ask; `tests/fuzz/stock_port.py` runs longer ones."""

from __future__ import annotations

import pytest

from tests.fuzz.stock_port import fuzz

pytestmark = pytest.mark.timeout(600)  # passing takes seconds, on a busy machine a minute


@pytest.mark.thorough
async def test_forged_messages_of_both_wires_change_nothing_for_honest_readers() -> None:
    """Over many connections, and by agents.

    Thorough: see `test_a_flood_of_hostile_messages_harms_nobody` of `stock/test_serving.py`.
    """
    messages = 2000
    report = await fuzz(messages, 7)
    assert sum(report.sent.values()) > 0.9 * messages
    assert min(report.honest["ours"], report.honest["stock"]) >= 20
    assert report.after.descriptors <= report.before.descriptors + 5
    assert report.after.tasks <= report.before.tasks
    assert report.after.resident_mb < report.before.resident_mb + 20
    assert report.listener.dropped > 0.1 * messages
    assert report.listener.refused > 0
    assert report.serving.malformed_notifications > 0
