"""What this rank answers to peers on the side channel. Answering never waits."""

from __future__ import annotations

import msgspec

from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import messages
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.producer.farewells import Farewells
from kvflow.runtime.producer.serving import Serving

_NAME_CHARS_SHOWN = 80


class Answers:
    """Answers for one rank, once it has a cache."""

    def __init__(
        self,
        context: RankContext,
        local: LocalRank,
        serving: Serving,
        peers: Peers,
        farewells: Farewells,
        metadata: messages.Metadata,
    ) -> None:
        self._clock = context.clock
        self._local = local
        self._serving = serving
        self._peers = peers
        self._farewells = farewells
        self.metadata = metadata
        """What readers are told of this rank, but for what its clock shows then."""

    def answer(self, header: messages.Header, request: messages.Request, *, draining: bool) -> messages.Reply:
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
                return messages.ClockShown(incarnation=self.metadata.incarnation, clock_s=self._clock.now_s())
            case messages.Goodbye():
                self._peers.said_goodbye(request)
                return messages.Ack()
            case messages.MetadataRequest():
                if draining and not self._serving.serves(request.request_id):
                    return refusal(f"engine {ours.engine_id!r} is draining", transient=True)
                if request.caller is not None:
                    self._farewells.remember(request.caller)
                return msgspec.structs.replace(self.metadata, clock_s=self._clock.now_s())


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
