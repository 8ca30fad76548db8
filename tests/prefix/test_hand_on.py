"""Engines that are taken out of service hand their prefixes on, and what becomes of offers that cannot be taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvflow import Config, PeerAddress, Runtime
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.errors import (
    KVFlowError,
    PeerIncompatible,
    PeerNotReady,
    PeerRefused,
    PeerUnreachable,
    RequestError,
    RuntimeDraining,
    UsageError,
)
from kvflow.prefix import HandedOnPrefix, HandOnReport, PinnedPrefix, Prefixes, PrefixRequest, prefix_keys
from kvflow.testing import CacheSize, TestEngine, assert_blocks_equal
from kvflow.testing.pair import open_engine
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.support.pairs import host_of, known, part_of
from tests.support.tests_support import WAIT_S, until

TOKENS = 4
BLOCKS = 64
BASE = Config(engine_id="any", transport="inproc", drain_timeout_s=1.0)
SIZE = CacheSize(num_blocks=BLOCKS, block_size=TOKENS)
TOKEN_BYTES = sum(tensor.nbytes for tensor in SIZE.make("any")[0].values()) // (BLOCKS * TOKENS)
PROMPTS = [[number * 100 + at for at in range(4 * TOKENS)] for number in range(1, 4)]


class ChatEngine:
    """An engine with a prefix cache that goes by least recent use, and counts the tokens that it computes."""

    def __init__(self, engine: TestEngine) -> None:
        self.engine = engine
        self.runtime: Runtime = engine.runtime
        self.prefixes = part_of(engine.runtime, Prefixes)
        self.block_of: OrderedDict[bytes, int] = OrderedDict()
        """The block that holds the end of each cached prefix, the least recently used first."""
        self.recent: OrderedDict[bytes, list[bytes]] = OrderedDict()
        """The keys of each prompt, by its last key, the least recently used first."""
        self.free = list(range(BLOCKS))
        self.pinned: dict[int, int] = {}
        self.computed = 0
        self.took: list[HandedOnPrefix] = []
        self.room = BLOCKS
        self.sharing = self.prefixes.share(self, pinned_blocks_max=BLOCKS)

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | None:
        found = self.block_of if key_tokens == TOKENS else {}
        blocks = []
        for key in keys:
            if key not in found:
                break
            blocks.append(found[key])
        for block in blocks:
            self.pinned[block] = self.pinned.get(block, 0) + 1
        return PinnedPrefix(blocks, len(blocks) * TOKENS) if blocks else None

    def unpin(self, pinned: PinnedPrefix) -> None:
        for block in pinned.block_ids:
            assert isinstance(block, int)
            self.pinned[block] -= 1

    def answer(self, prompt: Sequence[int]) -> None:
        """Answer a prompt: compute the tokens that are not cached, and keep its full blocks."""
        keys = prefix_keys(prompt, TOKENS)
        cached = self.cached(keys)
        self.computed += len(prompt) - cached * TOKENS
        self.put(keys, [self.free.pop() for _ in keys[cached:]])
        self.recent[keys[-1]] = keys
        for key in [key for key in self.recent if key in keys[:-1]]:
            del self.recent[key]  # the prompts of earlier turns

    def cached(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks are cached."""
        return next((at for at, key in enumerate(keys) if key not in self.block_of), len(keys))

    def put(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        self.block_of.update(zip(keys[len(keys) - len(blocks) :], blocks, strict=True))

    async def take(self, offered: HandedOnPrefix) -> int | None:
        """Pull an offered prefix into free blocks."""
        self.took.append(offered)
        keys = list(offered.keys)
        cached = self.cached(keys)
        if len(keys) - cached > min(self.room, len(self.free)):
            return None
        blocks = [self.free.pop() for _ in keys[cached:]]
        report = await self.prefixes.pull(
            PrefixRequest(
                request_id=f"take-{len(self.took)}",
                keys=keys,
                key_tokens=offered.key_tokens,
                block_ids=blocks,
                peers=[offered.holder],
                cached_tokens=cached * TOKENS,
                deadline_s=offered.within_s,
                answer_within_s=WAIT_S,
            )
        )
        pulled = report.pulled_tokens // TOKENS
        self.put(keys[: cached + pulled], blocks[:pulled])
        self.free += blocks[pulled:]
        self.room -= pulled
        return report.pulled_tokens

    async def hand_on(self, successor: ChatEngine, **changes: Any) -> HandOnReport:
        given = {"key_tokens": TOKENS, "bytes_max": 1 << 30, "within_s": WAIT_S, **changes}
        return await self.prefixes.hand_on(successor.runtime.address, [*reversed(self.recent.values())], **given)


@dataclass
class Fleet:
    """Opens engines on one network."""

    stack: contextlib.AsyncExitStack
    network: InprocNetwork

    async def open(
        self, name: str, base: Config = BASE, *, accepts: bool = True, follow_successors: bool = False
    ) -> ChatEngine:
        def make(_: Config, agent: str) -> InprocTransport:
            return InprocTransport(agent, self.network)

        opened = open_engine(name, base, make, size=SIZE, parts=[Prefixes(follow_successors=follow_successors)])
        engine = ChatEngine(await self.stack.enter_async_context(opened))
        if accepts:
            engine.prefixes.accept(engine.take, predecessors=None)
        return engine


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        yield Fleet(stack, InprocNetwork())


@pytest.fixture
async def old(fleet: Fleet) -> ChatEngine:
    """An engine that has answered three prompts."""
    engine = await fleet.open("old")
    for prompt in PROMPTS:
        engine.answer(prompt)
    return engine


@pytest.fixture
async def new(fleet: Fleet) -> ChatEngine:
    return await fleet.open("new")


Conversations = dict[int, list[int]]
_CONVERSATIONS, _TURNS, _TURN_TOKENS = 6, 5, 2 * TOKENS


async def talk(fleet: Fleet, restart: Callable[[ChatEngine, ChatEngine], Awaitable[object]] | None) -> int:
    """Return how many tokens two decode servers compute for conversations of five turns.

    After the third turn each server is replaced, one after the other: `restart` is given the old one and the new one.
    """
    servers = [await fleet.open(f"server-{number}") for number in range(2)]
    ended = 0
    talks: Conversations = {number: [] for number in range(_CONVERSATIONS)}
    for turn in range(_TURNS):
        for number, history in talks.items():
            history += [number * 1000 + turn * 100 + at for at in range(_TURN_TOKENS)]
            servers[number % 2].answer(history)
        if turn == 2 and restart is not None:
            for place, before in enumerate(servers):
                servers[place] = await fleet.open(f"server-{place}.2")
                await restart(before, servers[place])
                ended += before.computed
                assert await before.runtime.drain(WAIT_S)
                await before.runtime.aclose()
    return ended + sum(server.computed for server in servers)


async def test_a_rolling_restart_recomputes_a_tenth_of_what_it_did(fleet: Fleet) -> None:
    async def nothing(_: ChatEngine, __: ChatEngine) -> None:
        return None

    new_tokens = await talk(await reopened(fleet), None)
    assert new_tokens == _CONVERSATIONS * _TURNS * _TURN_TOKENS, "without a restart only new tokens are computed"
    cold = await talk(await reopened(fleet), nothing) - new_tokens
    handed_on = await talk(await reopened(fleet), ChatEngine.hand_on) - new_tokens
    assert cold == _CONVERSATIONS * 3 * _TURN_TOKENS, "every history so far"
    assert handed_on <= cold / 10
    assert handed_on == 0


async def reopened(fleet: Fleet) -> Fleet:
    """Return a fleet of other engines, with other names, on another network."""
    return Fleet(fleet.stack, InprocNetwork())


async def test_a_successor_pulls_the_most_recent_first(old: ChatEngine, new: ChatEngine) -> None:
    report = await old.hand_on(new)
    assert (report.prefixes, report.tokens, report.reason) == (3, 3 * 4 * TOKENS, "")
    assert report.bytes == report.tokens * TOKEN_BYTES
    assert [offered.keys for offered in new.took] == [prefix_keys(one, TOKENS) for one in reversed(PROMPTS)]
    for prompt in PROMPTS:
        keys = prefix_keys(prompt, TOKENS)
        ours, theirs = ([engine.block_of[key] for key in keys] for engine in (new, old))
        assert_blocks_equal(new.engine.cache, ours, old.engine.cache, theirs)
    assert known(old.prefixes.statistics).handed_on_tokens == report.tokens
    assert known(new.prefixes.statistics).taken_over_tokens == report.tokens
    await until(lambda: not any(old.pinned.values()))
    again = await old.hand_on(new)
    assert (again.prefixes, again.tokens) == (3, 0), "it has them"


async def test_the_bound_in_bytes_cuts_the_last_prefix(old: ChatEngine, new: ChatEngine) -> None:
    block_bytes = TOKENS * TOKEN_BYTES
    report = await old.hand_on(new, bytes_max=6 * block_bytes + 1)
    assert report.tokens == 6 * TOKENS
    assert report.bytes == 6 * block_bytes
    assert "bytes_max" in report.reason
    assert new.cached(prefix_keys(PROMPTS[-2], TOKENS)) == 2


async def test_it_stops_when_the_successor_has_no_room(old: ChatEngine, new: ChatEngine) -> None:
    new.room = 5
    report = await old.hand_on(new)
    assert (report.prefixes, report.tokens, report.reason) == (1, 4 * TOKENS, "no room")


async def test_it_stops_when_the_time_is_over(old: ChatEngine, new: ChatEngine) -> None:
    new.engine.transport.faults.hold = True
    report = await old.hand_on(new, within_s=0.05)
    assert (report.prefixes, report.tokens) == (0, 0)
    assert "within_s" in report.reason
    new.engine.transport.faults.hold = False
    new.engine.transport.perform()
    await until(lambda: not any(old.pinned.values()))


async def test_what_the_old_engine_has_lost_is_no_failure(old: ChatEngine, new: ChatEngine) -> None:
    lost = old.block_of.pop(prefix_keys(PROMPTS[1], TOKENS)[2])
    assert lost is not None
    report = await old.hand_on(new)
    assert (report.prefixes, report.tokens, report.reason) == (3, 10 * TOKENS, "")


async def test_an_engine_accepts_nothing_unless_it_says_so(fleet: Fleet, old: ChatEngine) -> None:
    new = await fleet.open("new", accepts=False)
    with pytest.raises(PeerRefused, match="takes over no prefixes"):
        await old.hand_on(new)
    new.prefixes.accept(new.take, predecessors=["tcp://10.0.0.7:5600"])
    with pytest.raises(PeerRefused, match=f"engine 'new' takes over no prefixes of an engine at {old.runtime.address}"):
        await old.hand_on(new)
    assert new.took == []
    new.prefixes.accept(new.take, predecessors=[old.runtime.address])
    assert (await old.hand_on(new)).prefixes == 3


async def test_an_engine_of_another_model_is_no_successor(fleet: Fleet, old: ChatEngine) -> None:
    other = await fleet.open("other", replace(BASE, model="other"))
    with pytest.raises(PeerIncompatible, match="model"):
        await old.hand_on(other)


async def test_a_successor_that_is_not_there_is_named(old: ChatEngine, new: ChatEngine) -> None:
    address = new.runtime.address
    await new.runtime.aclose()
    with pytest.raises(PeerUnreachable, match=address):
        await old.prefixes.hand_on(address, [], key_tokens=TOKENS, bytes_max=1, within_s=WAIT_S)


async def test_a_successor_that_closes_meanwhile_says_so(old: ChatEngine, new: ChatEngine) -> None:
    new.engine.transport.faults.hold = True
    handing_on = asyncio.ensure_future(old.hand_on(new))
    await until(lambda: new.engine.transport.held)
    closing = asyncio.ensure_future(new.runtime.aclose())
    with pytest.raises((PeerNotReady, PeerUnreachable)):
        await handing_on
    new.engine.transport.faults.hold = False
    new.engine.transport.perform()
    await closing


async def test_an_offer_goes_on_when_other_predecessors_are_named(old: ChatEngine, new: ChatEngine) -> None:
    """Predecessors come and go. The offer's other prefixes are pulled by the new function."""
    new.engine.transport.faults.hold = True
    handing_on = asyncio.ensure_future(old.hand_on(new))
    await until(lambda: new.engine.transport.held)
    pulled = list[HandedOnPrefix]()

    async def take(offered: HandedOnPrefix) -> int | None:
        pulled.append(offered)
        return await new.take(offered)

    new.prefixes.accept(take, predecessors=["tcp://10.0.0.7:5600"])
    new.engine.transport.faults.hold = False
    new.engine.transport.perform()
    assert ((await handing_on).prefixes, len(pulled)) == (3, 2)
    with pytest.raises(PeerRefused, match="takes over no prefixes"):
        await old.hand_on(new)


async def test_a_function_of_the_engine_that_fails_ends_the_offer(old: ChatEngine, new: ChatEngine) -> None:
    async def fail(_: HandedOnPrefix) -> int:
        raise ValueError("no blocks")

    async def lie(offered: HandedOnPrefix) -> int:
        return len(offered.keys) * TOKENS + 1

    async def refuse(_: HandedOnPrefix) -> int:
        raise RequestError("not this one")

    for take, says in ((fail, "ValueError: no blocks"), (lie, "17 tokens of a prefix of 16"), (refuse, "not this one")):
        new.prefixes.accept(take, predecessors=None)
        report = await old.hand_on(new)
        assert (report.prefixes, report.tokens) == (0, 0)
        assert says in report.reason


async def found_by(reader: ChatEngine, prompt: Sequence[int], *peers: str) -> str:
    """Return the engine from which the reader pulls a prompt that it is told to ask these peers for."""
    keys = prefix_keys(prompt, TOKENS)
    blocks = [reader.free.pop() for _ in keys]
    request = PrefixRequest("reads", keys, TOKENS, blocks, peers, answer_within_s=WAIT_S)
    report = await reader.prefixes.pull(request)
    return report.source.partition(" ")[0]


async def test_readers_of_an_engine_that_has_left_ask_its_successor(
    fleet: Fleet, old: ChatEngine, new: ChatEngine
) -> None:
    """Only those that say so, until the old one is back. Twice, since the successor may leave, too."""
    follows, stays = await fleet.open("follows", follow_successors=True), await fleet.open("stays")
    gone, last = old.runtime.address, await fleet.open("last")
    for reader in (follows, stays):
        assert await found_by(reader, PROMPTS[0], gone) == "old"
    for leaving, successor in ((old, new), (new, last)):
        await leaving.hand_on(successor)
        successor.recent = leaving.recent
        assert await leaving.runtime.drain(WAIT_S, successor=successor.runtime.introduce())
        await leaving.runtime.aclose()
        name = host_of(successor.runtime).context.config.engine_id
        assert await found_by(follows, PROMPTS[0], gone) == name
        assert await found_by(follows, PROMPTS[1], gone, successor.runtime.address) == name, "it is asked once"
        assert await found_by(stays, PROMPTS[0], gone) == ""
    host_of(follows.runtime).peers.successors.clear()  # as once it is connected to an engine at the old address
    follows.prefixes._questions._addresses[gone] = PeerAddress(engine_id="old.2", address=gone)  # type: ignore[union-attr]
    assert await found_by(follows, PROMPTS[0], gone) == ""


async def test_a_forged_successor_is_no_address(fleet: Fleet, old: ChatEngine) -> None:
    reader = await fleet.open("reader", follow_successors=True)
    assert await found_by(reader, PROMPTS[0], old.runtime.address) == "old"
    host = host_of(old.runtime)
    for address in ("", "tcp://", "tcp://nowhere:0", "tcp://\n:1"):
        goodbye = messages.Goodbye(
            target=host_of(reader.runtime).context.local.caller,
            sender=host.context.local.caller,
            incarnation=host.context.incarnation,
            successor=Address("forged", Rank(0, 0, 0), address),
        )
        host_of(reader.runtime).peers.on_goodbye(goodbye)
        assert not host_of(reader.runtime).peers.successors
        assert await found_by(reader, PROMPTS[0], old.runtime.address) == "old"


async def test_one_offer_at_a_time(old: ChatEngine, new: ChatEngine) -> None:
    new.engine.transport.faults.hold = True
    handing_on = asyncio.ensure_future(old.hand_on(new))
    await until(lambda: new.engine.transport.held)
    with pytest.raises(UsageError, match="another call is under way at engine 'old'"):
        await old.hand_on(new)
    handing_on.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handing_on
    new.engine.transport.faults.hold = False
    new.engine.transport.perform()
    await until(lambda: not any(old.pinned.values()))
    assert (await old.hand_on(new)).prefixes == 3, "it begins again"


async def test_a_draining_engine_hands_nothing_on(old: ChatEngine, new: ChatEngine) -> None:
    await old.runtime.drain(WAIT_S)
    with pytest.raises(RuntimeDraining):
        await old.hand_on(new)


async def test_an_engine_that_shares_nothing_hands_nothing_on(old: ChatEngine, new: ChatEngine) -> None:
    old.sharing.close()
    with pytest.raises(UsageError, match="no cache of engine 'old' is shared"):
        await old.hand_on(new)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"key_tokens": 0}, "hand_on: key_tokens"),
        ({"bytes_max": 0}, "hand_on: bytes_max"),
        ({"within_s": -1}, "hand_on: within_s"),
        ({"within_s": 3601}, "hand_on: within_s: expected at most 3600, got 3601"),
        ({"prefixes": [[b"short"]]}, r"hand_on: prefixes\[0\]: expected keys of 32 bytes"),
        ({"prefixes": 7}, "hand_on: prefixes"),
        ({"successor": 7}, "hand_on: successor"),
        ({"successor": "nowhere"}, "nowhere"),
    ],
)
async def test_bad_input_is_refused_by_name(old: ChatEngine, changes: dict[str, Any], says: str) -> None:
    given = {"successor": "tcp://127.0.0.1:1", "prefixes": [], "key_tokens": 4, "bytes_max": 1, "within_s": 1}
    with pytest.raises(KVFlowError, match=says) as caught:
        await old.prefixes.hand_on(**{**given, **changes})
    assert isinstance(caught.value, RequestError)


@pytest.mark.parametrize("predecessors", [7, ["nowhere"], [b"tcp://127.0.0.1:1"], ["tcp://127.0.0.1:1"] * 65])
async def test_predecessors_are_addresses(new: ChatEngine, predecessors: Any) -> None:
    with pytest.raises(RequestError, match="accept: predecessors"):
        new.prefixes.accept(new.take, predecessors=predecessors)
    with pytest.raises(RequestError, match="accept: take"):
        new.prefixes.accept(predecessors, predecessors=None)
