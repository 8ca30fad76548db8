"""Checks of a peer's side channel, step by step: host name, TCP connection, answer (`kvflow doctor --peer`)."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing

import msgspec

from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.doctor.findings import Finding, fail, ok
from kvflow.errors import ConfigError, KVFlowError
from kvflow.hosts import host_in_url, split_address
from kvflow.runtime.channel.asking import ZmqSideChannel

REACH_FIX = "check that the engine runs, that it listens there (Config.listen), and that no firewall blocks it"
READER, NO_FINGERPRINT = "kvflow-doctor", bytes(16)


async def examine_peer(config: Config, address: str, engine_id: str) -> list[Finding]:
    """Check the side channel at `address` in three steps. Return the findings up to the first step that fails.

    `engine_id`: expected engine; "" accepts any.
    """
    try:
        host, port = split_address(address, what="--peer")
    except ConfigError as error:
        return [fail("peer", str(error), "give the address that tickets of the peer name")]
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError as error:
        return [fail("peer's name", f"{host}: {error}", "check the name, or use the address (Config.advertise_host)")]
    found = [ok("peer's name", f"{host}: {', '.join(sorted({str(entry[4][0]) for entry in entries}))}")]
    name, start_s = "connection to peer", time.perf_counter()
    try:
        async with asyncio.timeout(config.handshake_timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        why = f"{host_in_url(host)}:{port}: {error or f'nothing within {config.handshake_timeout_s} s'}"
        return [*found, fail(name, why, REACH_FIX)]
    found.append(ok(name, f"{host_in_url(host)}:{port} in {(time.perf_counter() - start_s) * 1e3:.1f} ms"))
    writer.close()
    question = messages.MetadataRequest(reader=READER, target=Address(engine_id or "?", Rank(0, 0, 0), address))
    with closing(ZmqSideChannel(config)) as channel:
        try:
            reply = await channel.ask(question, fingerprint=NO_FINGERPRINT)
        except KVFlowError as error:
            fix = "check that a kvflow side channel listens there, and the CURVE keys of both sides"
            return [*found, fail("peer's answer", str(error), fix)]
    return [*found, judge_answer(reply, engine_id)]


def judge_answer(reply: messages.Reply, engine_id: str) -> Finding:
    """Return the finding about `reply`, the peer's answer to a metadata request with an empty fingerprint.

    A kvflow rank refuses that request; its refusal has the rank's protocol version and facts about its cache.
    `engine_id`: expected engine; "" accepts any.
    """
    name = "peer's answer"
    if not isinstance(reply, messages.Refusal):
        return ok(name, f"a kvflow rank: {type(reply).__name__}")
    if reply.version != codec.PROTOCOL_VERSION:
        found = f"kvflow protocol version: ours {codec.PROTOCOL_VERSION}, theirs {reply.version}"
        return fail(name, found, "run the same version of kvflow on both sides")
    if reply.compatibility is not None:
        facts = msgspec.structs.asdict(reply.compatibility).items()
        cache = ", ".join(f"{fact} {value!r}" for fact, value in facts)
        return ok(name, f"kvflow protocol {reply.version}; its cache: {cache}")
    found = f"kvflow protocol {reply.version}: {reply.reason}"
    if engine_id and not reply.transient:
        return fail(name, found, "give the id and the base port of the engine that tickets name")
    return ok(name, found)
