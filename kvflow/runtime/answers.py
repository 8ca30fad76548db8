"""What this rank answers to peers on the side channel. Answering never waits."""

from __future__ import annotations

import msgspec

from kvflow.core import wire
from kvflow.core.topology import Rank
from kvflow.runtime.cache import RegisteredCache
from kvflow.runtime.connection import LocalRank

_NAME_CHARS_SHOWN = 80


def answer(cache: RegisteredCache, header: wire.Header, request: wire.Request, *, draining: bool) -> wire.Reply:
    """The answer to a request. A rank that drains connects readers of its open leases only."""
    local = cache.local
    ours, theirs = local.caller.target, request.target
    if theirs.engine_id != ours.engine_id:
        asked_for = theirs.engine_id[:_NAME_CHARS_SHOWN]
        return refusal(f"unknown engine: expected {asked_for!r}, this is {ours.engine_id!r}")
    if header.fingerprint != local.compatibility.fingerprint():
        return refusal("the caches are not compatible", local=local)
    if theirs != ours:
        return refusal(f"expected {_rank(theirs)}, this is {_rank(ours)}")
    match request:
        case wire.LeaseRequest():
            return cache.serving.find(request)
        case wire.ReleaseRequest():
            try:
                return cache.serving.release(request)
            except wire.WireError as error:
                return refusal(str(error))
        case wire.ClockRequest():
            return wire.ClockShown(incarnation=cache.metadata.incarnation, clock_s=cache.clock.now_s())
        case wire.Goodbye():
            cache.peers.said_goodbye(request)
            return wire.Noted()
        case wire.MetadataRequest():
            if draining and not cache.serving.serves(request.request_id):
                return refusal(f"engine {ours.engine_id!r} is draining", passing=True)
            if request.caller is not None:
                cache.readers.remember(request.caller)
            return msgspec.structs.replace(cache.metadata, clock_s=cache.clock.now_s())


def refusal(reason: str, *, local: LocalRank | None = None, passing: bool = False) -> wire.Refusal:
    """A "no"; with what we are, if that is the reason."""
    return wire.Refusal(
        reason=reason,
        version=wire.PROTOCOL_VERSION,
        passing=passing,
        compatibility=local.compatibility if local else None,
        holding=local.holding if local else None,
    )


def _rank(target: wire.Target) -> Rank:
    return Rank(target.dp_rank, target.pp_rank, target.tp_rank)
