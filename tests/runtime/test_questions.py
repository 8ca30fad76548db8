"""The end of the side channel that asks, without a runtime around it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from dataclasses import replace
from functools import partial

import pytest
from hand_overs import free_ports
from side_channels import ANSWER, PLAIN, address_of, asking, listening, to
from tests_support import limited, until

from kvflow.errors import PeerUnreachable


async def test_a_port_that_is_opened_a_moment_later_answers() -> None:
    """ZeroMQ tries again; only a refusal of the system ends the question."""
    probes = 0
    async with contextlib.AsyncExitStack() as stack:
        channel = stack.enter_context(asking())
        port = free_ports(1)

        async def probe(address: str, *, final: bool) -> bool:
            nonlocal probes
            probes += 1
            if probes == 1:
                await stack.enter_async_context(listening(replace(PLAIN, listen=f"tcp://127.0.0.1:{port}")))
            return True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvflow.runtime.channel.asking._probe", probe)
            reply = await channel.ask(to(f"tcp://127.0.0.1:{port}"), fingerprint=b"")
        assert reply == ANSWER
        assert probes >= 1


async def test_many_questions_at_once() -> None:
    """By default ZeroMQ has fewer sockets."""
    count = 400
    config = limited(
        # the last of them waits for all the others
        replace(PLAIN, handshake_timeout_s=10 * PLAIN.handshake_timeout_s),
        side_channel_connections_max=2 * count,
        side_channel_requests_per_s_max=10**6,
    )
    async with listening(config) as listener:
        with asking(config) as channel:
            asked = [channel.ask(to(address_of(listener)), fingerprint=b"") for _ in range(count)]
            assert await asyncio.gather(*asked) == [ANSWER] * count


async def test_no_sockets_are_left() -> None:
    """A shortage of the machine is an error like any other of an unreachable peer."""
    async with listening(replace(PLAIN, listen="tcp://0.0.0.0:0", advertise_host="127.0.0.1")) as listener:
        with asking() as channel:
            kept = partial(channel.ask, to(address_of(listener)), fingerprint=b"")
            ask = partial(channel.ask, to(f"tcp://127.0.0.2:{listener.port}"), fingerprint=b"")
            assert await kept() == ANSWER
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            # Not as many as are used now: ZeroMQ may still be closing those of the question before.
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                with pytest.raises(PeerUnreachable, match="Too many open files"):
                    await ask()
                assert await kept() == ANSWER
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert await ask() == ANSWER


async def test_questions_under_way_outlive_the_closing_of_their_channel() -> None:
    """And the last one ends ZeroMQ's threads: nothing is left behind."""
    before = threads()
    async with listening(PLAIN) as listener:
        with asking() as channel:
            ask = partial(channel.ask, to(address_of(listener)), fingerprint=b"")
            asked = [asyncio.create_task(ask()) for _ in range(5)]
            await asyncio.sleep(0)
            channel.close()
        assert await asyncio.gather(*asked) == [ANSWER] * 5
    await until(lambda: threads() <= before)


def threads() -> int:
    """Of this process, ZeroMQ's included."""
    return len(os.listdir("/proc/self/task"))
