"""Engines of this version of the wire and of the next one: each refuses the other, names both, and keeps nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import next_version
import pytest

import kvflow
from kvflow import LeaseOutcome, LoadRequest
from kvflow.core.protocol.codec import PROTOCOL_VERSION
from kvflow.errors import PeerIncompatible, RequestError
from kvflow.testing import InprocPair, assert_quiet

OURS, NEXT = PROTOCOL_VERSION, next_version.NEXT


@pytest.mark.thorough
async def test_two_versions_refuse_each_other_and_say_why(pair: InprocPair) -> None:
    """Thorough: see `test_another_protocol_version_is_refused_by_both_sides` of `runtime/test_side_channel.py`."""
    root = str(Path(kvflow.__file__).parents[1])
    other = await asyncio.create_subprocess_exec(
        sys.executable,
        str(next_version.__file__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert other.stdin is not None
    assert other.stdout is not None
    consumer = pair.consumer.runtime
    lease = pair.offer([3])
    async with asyncio.timeout(100):
        theirs = json.loads(await other.stdout.readline())
        assert theirs["kvflow"]["version"] == NEXT

        with pytest.raises(RequestError, match=f"ticket: kvflow version: ours {OURS}, theirs {NEXT}"):
            await consumer.load_blocks(LoadRequest("req", theirs, block_ids=[0]))
        assert consumer.statistics().peers == (), "nobody was asked"
        disguised = next_version.changed(theirs, OURS)
        with pytest.raises(PeerIncompatible, match=f"protocol version: ours {OURS}, theirs {NEXT}") as caught:
            await consumer.load_blocks(LoadRequest("req", disguised, block_ids=[0]))
        assert not caught.value.retryable
        assert caught.value.quarantine is None
        assert_quiet(consumer.statistics())

        other.stdin.write(json.dumps(lease.ticket.to_params()).encode() + b"\n")
        (ticket_error, ticket_message), (peer_error, peer_message) = json.loads(await other.stdout.readline())
        assert await other.wait() == 0, "it has left nothing behind"
    assert (ticket_error, peer_error) == ("RequestError", "PeerIncompatible")
    assert f"ours {NEXT}, theirs {OURS}" in ticket_message
    assert f"ours {NEXT}, theirs {OURS}" in peer_message
    assert not lease.done, "our offer stands"
    assert await lease.revoke() is LeaseOutcome.REVOKED
