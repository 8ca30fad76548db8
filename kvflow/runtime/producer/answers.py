"""What this rank answers to peers on the side channel. Answering never waits."""

from __future__ import annotations

import msgspec

from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import messages
from kvflow.runtime.clock import Clock
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.producer.farewells import Farewells
from kvflow.runtime.producer.serving import Serving

_NAME_CHARS_SHOWN = 80


class Answers:
    """What a rank with a registered cache answers."""

    def __init__(
        self,
        clock: Clock,
        local: LocalRank,
        metadata: messages.Metadata,
        serving: Serving,
        peers: Peers,
        readers: Farewells,
    ) -> None:
        self._clock = clock
        self._local = local
        self._metadata = metadata
        self._serving = serving
        self._peers = peers
        self._readers = readers

    def to(self, header: messages.Header, request: messages.Request, *, draining: bool) -> messages.Reply:
        """The answer to a request. A rank that drains connects readers of its open leases only."""
        ours, theirs = self._local.caller.target, request.target
        if theirs.engine_id != ours.engine_id:
            asked_for = theirs.engine_id[:_NAME_CHARS_SHOWN]
            return refusal(f"unknown engine: expected {asked_for!r}, this is {ours.engine_id!r}")
        if header.fingerprint != self._local.compatibility.fingerprint():
            return refusal("the caches are not compatible", local=self._local)
        if theirs != ours:
            return refusal(f"expected {_rank(theirs)}, this is {_rank(ours)}")
        match request:
            case messages.LeaseRequest():
                return self._serving.find(request)
            case messages.ReleaseRequest():
                try:
                    return self._serving.release(request)
                except messages.WireError as error:
                    return refusal(str(error))
            case messages.ClockRequest():
                return messages.ClockShown(incarnation=self._metadata.incarnation, clock_s=self._clock.now_s())
            case messages.Goodbye():
                self._peers.said_goodbye(request)
                return messages.Ack()
            case messages.MetadataRequest():
                if draining and not self._serving.serves(request.request_id):
                    return refusal(f"engine {ours.engine_id!r} is draining", transient=True)
                if request.caller is not None:
                    self._readers.remember(request.caller)
                return msgspec.structs.replace(self._metadata, clock_s=self._clock.now_s())


def refusal(reason: str, *, local: LocalRank | None = None, transient: bool = False) -> messages.Refusal:
    """A "no"; with what we are, if that is the reason."""
    return messages.Refusal(
        reason=reason,
        version=messages.PROTOCOL_VERSION,
        transient=transient,
        compatibility=local.compatibility if local else None,
        cache_share=local.cache_share if local else None,
    )


def _rank(target: messages.Target) -> Rank:
    return Rank(target.dp_rank, target.pp_rank, target.tp_rank)
