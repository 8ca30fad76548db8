"""A side channel on top of another, with answers scripted by a test."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from kvflow import Config
from kvflow.core.protocol import codec, messages
from kvflow.errors import PeerUnreachable
from kvflow.runtime.channel.protocol import Answer, Listener, SideChannel
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, InprocPair, ManualClock, inproc_pair

Outcome = messages.Reply | Exception | Callable[[messages.Reply], messages.Reply]


@dataclass
class ScriptedSideChannel:
    """A side channel that records every question and answers by a script.

    The next questions get the outcomes in `script`: an answer, an error, or a function that changes the peer's answer.
    When `script` is empty, the peer answers.
    """

    script: deque[Outcome] = field(default_factory=deque)
    asked: list[messages.Request] = field(default_factory=list)
    mute: tuple[type[messages.Request], ...] = ()
    """Kinds of questions that fail with PeerUnreachable."""
    beneath: Callable[[Config], SideChannel] = World().side_channel
    """Makes the side channel that carries all other questions."""

    def __call__(self, config: Config) -> ScriptedSideChannel:
        self._real = self.beneath(config)
        return self

    async def listen(self, answer: Answer, requests: codec.RequestDecoder = codec.CORE_REQUESTS) -> Listener:
        return await self._real.listen(answer, requests)

    async def ask(
        self, request: messages.Request, *, fingerprint: bytes, timeout_s: float | None = None
    ) -> messages.Reply:
        self.asked.append(request)
        if isinstance(request, self.mute):
            raise request.target.failure(PeerUnreachable, "scripted")
        outcome = self.script.popleft() if self.script else None
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None and not callable(outcome):
            return outcome
        reply = await self._real.ask(request, fingerprint=fingerprint, timeout_s=timeout_s)
        return reply if outcome is None else outcome(reply)

    def close(self) -> None:
        self._real.close()


@dataclass
class ScriptedWorld:
    """A world with a scripted side channel and a manual clock, for one engine."""

    channel: ScriptedSideChannel = field(default_factory=ScriptedSideChannel)
    clock: ManualClock = field(default_factory=ManualClock)

    @property
    def world(self) -> World:
        return World(side_channel=self.channel, clock=lambda: self.clock)


@asynccontextmanager
async def scripted_pair(config: Config) -> AsyncIterator[tuple[InprocPair, ScriptedSideChannel]]:
    """Open a pair for virtual time, with a scripted side channel for the reader's questions."""
    channel, world = ScriptedSideChannel(), InprocCluster().world()
    channel.beneath = world.side_channel
    reader = replace(world, side_channel=channel)
    async with inproc_pair(config=config, producer_world=world, consumer_world=reader) as pair:
        yield pair, channel


def refusal(reason: str, *, transient: bool = False, version: int = codec.PROTOCOL_VERSION) -> messages.Refusal:
    return messages.Refusal(reason=reason, version=version, transient=transient)
