"""Check whether a running decode engine could load from a running prefill engine (`kvflow doctor --pair`).

The doctor asks rank 0 of both engines for their metadata, as a reader does, and applies the decode engine's handshake
rules. Whether the two engines reach each other (network, CURVE keys, NIXL backends) is not checked: only the engines
themselves can find out.
"""

from __future__ import annotations

from contextlib import closing
from typing import TypeAlias

from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.claims import all_regions_from_wire
from kvflow.core.protocol.compatibility import Compatibility
from kvflow.doctor.findings import Finding, fail, ok
from kvflow.doctor.peer_channel import NO_FINGERPRINT, REACH_FIX, READER
from kvflow.errors import ConfigError, KVFlowError, PeerRefused, PeerUnreachable
from kvflow.hosts import plain_address
from kvflow.runtime.channel.asking import ZmqSideChannel
from kvflow.runtime.peers.handshake import incompatibilities
from kvflow.runtime.peers.peer import LocalRank

_RULE_FIX = "make this equal on both sides, or do not let a router pair these engines"


_EngineFacts: TypeAlias = tuple[Address, Compatibility, messages.Metadata]
"""Facts about rank 0 of an engine: its address, the facts that must be equal on both sides, and its metadata."""


class _Refused(Exception):
    """An engine refused to send its facts or its metadata. The message is the engine's reason."""


async def examine_pair(config: Config, prefill: str, decode: str) -> list[Finding]:
    """Ask two running engines for their metadata, and judge whether `decode` could load blocks from `prefill`.

    `prefill`, `decode`: the engines, as ENGINE_ID@tcp://host:port. `config`: timeouts and CURVE keys for the questions.
    """
    engines, findings = list[_EngineFacts](), list[Finding]()
    with closing(ZmqSideChannel(config)) as channel:
        for name, place in (("prefill engine", prefill), ("decode engine", decode)):
            try:
                engines.append(await _ask_engine(channel, place))
                findings.append(ok(name, f"{engines[-1][0]}: it answers readers"))
            except (_Refused, KVFlowError, codec.WireError) as problem:
                findings.append(fail(name, f"{place}: {problem}", _advice(place, problem)))
    return [*findings, *judge_pair(*engines)] if len(engines) == 2 else findings


def _advice(place: str, problem: Exception) -> str:
    """Return advice for the user about `problem`, the error of a question to an engine for its metadata.

    `place`: the engine, as ENGINE_ID@tcp://host:port.
    """
    match problem:
        case ConfigError():
            return "give ENGINE_ID@tcp://host:port as tickets name them"
        case PeerUnreachable():
            return REACH_FIX
        case PeerRefused():
            own = place.rpartition("@")[0]
            return f"check that its id is {own!r}, that it has registered its cache, and the CURVE keys of both sides"
        case _Refused():
            return "wait until the engine has registered its cache, and give the id that its tickets name"
        case _:
            return "check that a kvflow side channel of this version listens there"


async def _ask_engine(channel: ZmqSideChannel, place: str) -> _EngineFacts:
    """Ask the engine `place` twice, and return its address, its compatibility facts and its metadata.

    A question carries a fingerprint, the digest of the reader's compatibility facts. The fingerprint of the first
    question is zero, so the engine refuses the question, and the refusal contains the engine's facts. The second
    question has the fingerprint of these facts, as from a compatible reader, and the answer is the metadata.
    """
    engine_id, named, where = place.rpartition("@")
    if not named or not engine_id:
        raise ConfigError(f"--pair: expected ENGINE_ID@tcp://host:port, got {place!r}")
    address = plain_address(where, what="--pair")
    at = Address(engine_id or "?", Rank(0, 0, 0), address)
    question = messages.MetadataRequest(reader=READER, target=at)
    refusal = await channel.ask(question, fingerprint=NO_FINGERPRINT)
    if not isinstance(refusal, messages.Refusal) or refusal.compatibility is None:
        raise _Refused(refusal.reason if isinstance(refusal, messages.Refusal) else type(refusal).__name__)
    facts = refusal.compatibility
    reply = await channel.ask(question, fingerprint=facts.fingerprint())
    if not isinstance(reply, messages.Metadata):
        raise _Refused(reply.reason if isinstance(reply, messages.Refusal) else type(reply).__name__)
    return at._replace(engine_id=engine_id), facts, reply


def judge_pair(prefill: _EngineFacts, decode: _EngineFacts) -> list[Finding]:
    """Return one finding for each handshake rule that forbids loads from `prefill` to `decode`.

    If no rule does, return one finding that says so. In the messages "ours" is the decode engine's value, and "theirs"
    the prefill engine's.
    """
    (at, facts, metadata), (their_at, their_facts, theirs) = decode, prefill
    ours = LocalRank(
        reader=READER,
        caller=at,
        compatibility=facts,
        cache_shares=metadata.cache_shares,
        regions=all_regions_from_wire(metadata.regions),
        groups=metadata.groups,
    )
    problems = facts.differences(their_facts)
    problems += incompatibilities(their_at.rank, theirs, all_regions_from_wire(theirs.regions), ours)
    if problems:
        return [fail("hand-over", problem, _RULE_FIX) for problem in dict.fromkeys(problems)]
    return [ok("hand-over", "the handshake allows it; whether the two reach each other was not tested")]
