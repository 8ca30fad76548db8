"""Every error a user of kvflow can meet, as one tree.

The type answers three questions: whose fault was it, is it worth trying again, and are my local blocks
safe (no byte can land in them any more)? Safety is never lost silently: an error whose blocks may still be
written carries a `quarantine` that can be awaited.

    KVFlowError
    |- InvalidInput            the caller's fault; do not retry as it is; memory untouched
    |  |- ConfigError          a Config value, or a dependency that Config asked for and is not installed
    |  |- LayoutError          tensors do not match the described cache
    |  |- RequestError         a ServeRequest, LoadRequest or ticket that cannot be right
    |  |  |- BlocksBusy        blocks that another request is using in a way that excludes this one
    |  |  `- PromptMismatch    a ticket that was used for another prompt than its own
    |  `- UsageError           a verb called in the wrong state: twice, too early
    |     |- RuntimeDraining   the runtime takes no new work: its owner drains it
    |     `- RuntimeClosed     the runtime was closed by its owner
    |- PeerError               the other side's fault, or the network's; names the peer
    |  |- PeerUnreachable      refused, no answer within the bound, or not asked since it failed before; retry later
    |  |- PeerRefused          answered "no" and why; do not retry as it is
    |  |  `- PeerNotReady      ... because it has no cache yet or drains; retry, there or elsewhere
    |  |- PeerIncompatible     protocol or cache do not match; do not retry; lists ours and theirs
    |  `- ProtocolError        answered something that is no kvflow message; do not retry
    |- LoadError               one load failed after it was accepted; names request and peer
    |  |- LeaseExpired         the blocks may have been reused: prefill again
    |  |- Overloaded           too many loads wait already; retry later, or elsewhere
    |  |- TransferFailed       the transport reported a failure; retry with the same ticket is allowed
    |  `- DeadlineExceeded     names the phase that ate the deadline; retry with more time
    `- RuntimeBroken           kvflow's own service died; every waiter gets it with the cause; restart
       `- TransportBroken      ... because the transport died
"""

from __future__ import annotations

from typing import Protocol


class Quarantine(Protocol):
    """Local blocks in which bytes may still land after their load has ended."""

    @property
    def request_id(self) -> str: ...

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def safe(self) -> bool:
        """Whether no byte can land in the blocks any more."""

    async def wait(self) -> None:
        """Return once the blocks are safe. Cancelling it leaves the quarantine as it is."""


class KVFlowError(Exception):
    """Base of all errors that kvflow raises on purpose."""


class InvalidInput(KVFlowError):
    """What the caller passed cannot be right; nothing was started and no memory was touched."""


class ConfigError(InvalidInput):
    """A Config value is out of range, or what it asks for is not installed or not there."""


class LayoutError(InvalidInput):
    """KV cache tensors do not match the described layout, or cannot be described."""


class RequestError(InvalidInput):
    """A request or ticket is malformed, or does not fit the registered cache."""


class BlocksBusy(RequestError):
    """Blocks are in use by another request in a way that excludes this one."""


class PromptMismatch(RequestError):
    """The ticket is of another prompt: what it offers would be answered, but to another question."""


class UsageError(InvalidInput):
    """A verb was called in the wrong state, such as before registration or twice."""


class RuntimeDraining(UsageError):
    """The runtime drains: what it has begun goes on, new work it does not take."""


class RuntimeClosed(UsageError):
    """The runtime was closed by its owner."""


class PeerError(KVFlowError):
    """Another engine, or the way to it, failed. `peer` names it."""

    def __init__(self, message: str, *, peer: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        self.retry_after_s = retry_after_s
        """Loads from the peer fail at once for so long, then it is asked again; None if the next load asks it."""


class PeerUnreachable(PeerError):
    """Nobody answers at the peer's address within the bound, or it has failed and is not asked for now."""


class PeerRefused(PeerError):
    """The peer answered the handshake with a refusal."""


class PeerNotReady(PeerRefused):
    """The peer is there, but has no cache yet or takes no new readers any more."""


class PeerIncompatible(PeerError):
    """The peer's protocol or cache cannot work with ours."""


class ProtocolError(PeerError):
    """The peer sent bytes that are no valid kvflow message."""


class LoadError(KVFlowError):
    """A load failed. `quarantine` is set when its local blocks may still be written."""

    def __init__(self, message: str, *, request_id: str, peer: str, quarantine: Quarantine | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.peer = peer
        self.quarantine = quarantine


class LeaseExpired(LoadError):
    """The producer's promise did not provably cover the whole read: it ran out, was withdrawn or was used up."""


class Overloaded(LoadError):
    """The load would have to wait, and as many wait already as may; nothing was started."""


class TransferFailed(LoadError):
    """The transport reported a failure while it read."""


class DeadlineExceeded(LoadError):
    """The request's deadline passed in `phase`."""

    def __init__(
        self, message: str, *, request_id: str, peer: str, phase: str, quarantine: Quarantine | None = None
    ) -> None:
        super().__init__(message, request_id=request_id, peer=peer, quarantine=quarantine)
        self.phase = phase


class RuntimeBroken(KVFlowError):
    """A service task of the runtime died; `__cause__` says of what."""


class TransportBroken(RuntimeBroken):
    """The transport can do no more work."""
