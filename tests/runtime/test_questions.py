"""The end of the side channel that asks, without a runtime around it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from dataclasses import replace

import pytest
from hand_overs import free_ports
from side_channels import PLAIN, REQUEST, Hands, listening
from tests_support import limited, until

from kvflow.core.protocol import messages
from kvflow.errors import PeerUnreachable
from kvflow.runtime.channel.asking import ZmqSideChannel


async def test_a_port_that_is_opened_a_moment_later_answers() -> None:
    """ZeroMQ tries again; what ends the question is that the system says no as well."""
    channel = ZmqSideChannel(PLAIN, Hands().now_s)
    probes = 0

    async with contextlib.AsyncExitStack() as stack:
        port = free_ports(1)

        async def probe(address: str) -> None:
            nonlocal probes
            probes += 1
            if probes == 1:
                await stack.enter_async_context(listening(replace(PLAIN, listen=f"tcp://127.0.0.1:{port}")))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvflow.runtime.channel.asking._probe", probe)
            reply = await channel.ask(f"tcp://127.0.0.1:{port}", REQUEST, fingerprint=b"")
        assert reply == messages.NoLease(ended=True)
        assert probes >= 1
    channel.close()


async def test_many_questions_at_once() -> None:
    """More than ZeroMQ has sockets for unless it is told to."""
    count = 400
    config = limited(
        # the last of them waits for all the others
        replace(PLAIN, handshake_timeout_s=10 * PLAIN.handshake_timeout_s),
        side_channel_connections_max=2 * count,
        side_channel_requests_per_s_max=10**6,
    )
    async with listening(config) as listener:
        channel = ZmqSideChannel(config, Hands().now_s)
        address = f"tcp://127.0.0.1:{listener.port}"
        asked = [channel.ask(address, REQUEST, fingerprint=b"") for _ in range(count)]
        assert await asyncio.gather(*asked) == [messages.NoLease(ended=True)] * count
        channel.close()


async def test_no_sockets_are_left() -> None:
    """The machine's trouble is an error like any other of a peer that cannot be asked."""
    async with listening(PLAIN) as listener:
        channel = ZmqSideChannel(PLAIN, Hands().now_s)
        address = f"tcp://127.0.0.1:{listener.port}"
        assert await channel.ask(address, REQUEST, fingerprint=b"") == messages.NoLease(ended=True)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Not as many as are used now: ZeroMQ may still be closing those of the question before.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(PeerUnreachable, match="Too many open files"):
                await channel.ask(address, REQUEST, fingerprint=b"")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert await channel.ask(address, REQUEST, fingerprint=b"") == messages.NoLease(ended=True)
        channel.close()


async def test_questions_under_way_outlive_the_closing_of_their_channel() -> None:
    """And the last one ends ZeroMQ's threads: nothing is left behind."""
    before = threads()
    async with listening(PLAIN) as listener:
        channel = ZmqSideChannel(PLAIN, Hands().now_s)
        address = f"tcp://127.0.0.1:{listener.port}"
        asked = [asyncio.create_task(channel.ask(address, REQUEST, fingerprint=b"")) for _ in range(5)]
        await asyncio.sleep(0)
        channel.close()
        channel.close()
        assert await asyncio.gather(*asked) == [messages.NoLease(ended=True)] * 5
    await until(lambda: threads() <= before)


def threads() -> int:
    """Of this process, ZeroMQ's included."""
    return len(os.listdir("/proc/self/task"))
