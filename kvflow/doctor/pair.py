"""Check of two running engines: would they hand over, and each rule that says no (`kvflow doctor --pair`).

Both are asked, as a reader would ask them, for what they tell readers; then the rules of the handshake are applied to
what the decode engine tells, in its place. Rank 0 of each is asked. What only the two can find out is whether they
reach each other: their networks, their CURVE keys, and NIXL's backends between them.
"""

from __future__ import annotations

from typing import TypeAlias

from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.claims import all_regions_from_wire
from kvflow.core.protocol.compatibility import Compatibility
from kvflow.doctor.findings import Finding, fail, ok
from kvflow.doctor.peer import REACH_FIX
from kvflow.errors import ConfigError, KVFlowError, PeerRefused, PeerUnreachable
from kvflow.hosts import plain_address
from kvflow.runtime.channel.asking import ZmqSideChannel
from kvflow.runtime.clock import SystemClock
from kvflow.runtime.peers.handshake import problems_of
from kvflow.runtime.peers.peer import LocalRank

_READER = "kvflow-doctor"
_NO_FINGERPRINT = bytes(16)
_FIX = "make both sides equal in this, or let their router not pair them"


_Shown: TypeAlias = tuple[Address, Compatibility, messages.Metadata]
"""An engine, and what it shows its readers."""


class _NotTold(Exception):
    """Refusal of an engine to tell, in words."""


async def examine_pair(config: Config, prefill: str, decode: str) -> list[Finding]:
    """Findings about two engines, each as ENGINE_ID@tcp://host:port. `config` is how we talk to them."""
    channel, shown, found = ZmqSideChannel(config, SystemClock().now_s), list[_Shown](), list[Finding]()
    try:
        for name, given in (("prefill engine", prefill), ("decode engine", decode)):
            try:
                shown.append(await _ask(channel, given))
                found.append(ok(name, f"{shown[-1][0]}: it answers its readers"))
            except (_NotTold, KVFlowError, codec.WireError) as problem:
                found.append(fail(name, f"{given}: {problem}", _advice(given, problem)))
    finally:
        channel.close()
    return [*found, *judge_pair(*shown)] if len(shown) == 2 else found


def _advice(given: str, problem: Exception) -> str:
    """What to do about an engine that has not told what its readers need, by what has happened."""
    match problem:
        case ConfigError():
            return "give ENGINE_ID@tcp://host:port as tickets name them"
        case PeerUnreachable():
            return REACH_FIX
        case PeerRefused():
            own = given.rpartition("@")[0]
            return f"is {own!r} its id, has it registered its cache, are the CURVE keys of both sides in order?"
        case _NotTold():
            return "wait until the engine has registered its cache, and give the id that its tickets name"
        case _:
            return "is it a kvflow side channel, of this version?"


async def _ask(channel: ZmqSideChannel, given: str) -> _Shown:
    """Ask an engine: without a cache, for the facts that have to be equal; then as a reader with those facts."""
    engine_id, named, at = given.rpartition("@")
    if not named or not engine_id:
        raise ConfigError("--pair: it names no engine id")
    address = plain_address(at, what="--pair")
    target = messages.Target(engine_id or "?", 0, 0, 0)
    question = messages.MetadataRequest(reader=_READER, target=target)
    refusal = await channel.ask(address, question, fingerprint=_NO_FINGERPRINT)
    if not isinstance(refusal, messages.Refusal) or refusal.compatibility is None:
        raise _NotTold(refusal.reason if isinstance(refusal, messages.Refusal) else type(refusal).__name__)
    facts = refusal.compatibility
    reply = await channel.ask(address, question, fingerprint=facts.fingerprint())
    if not isinstance(reply, messages.Metadata):
        raise _NotTold(reply.reason if isinstance(reply, messages.Refusal) else type(reply).__name__)
    return Address(engine_id, Rank(0, 0, 0), address), facts, reply


def judge_pair(prefill: _Shown, decode: _Shown) -> list[Finding]:
    """Findings for each rule that says no, in the decode engine's words: "ours" is its own."""
    (at, facts, metadata), (their_at, their_facts, theirs) = decode, prefill
    ours = LocalRank(
        reader=_READER,
        caller=messages.Caller(target=at.target, address=at.address),
        compatibility=facts,
        cache_shares=metadata.cache_shares,
        regions=all_regions_from_wire(metadata.regions),
        groups=metadata.groups,
    )
    found = facts.differences(their_facts)
    found += problems_of(their_at.rank, theirs, all_regions_from_wire(theirs.regions), ours)
    if found:
        return [fail("hand-over", problem, _FIX) for problem in dict.fromkeys(found)]
    return [ok("hand-over", "no rule says no; whether they reach each other only the two can find out")]
