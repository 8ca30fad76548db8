"""Every error a user of kvflow can meet, as one tree.

Each class answers three questions by attributes: `blame`, whose fault it was; `retryable`, whether the same call with
the same ticket may succeed later or on another engine; `memory_safe`, whether the local blocks may be reused at once.
Of a class, `memory_safe` is False ("ask" below) where errors of it differ. An error itself knows: it is so unless
it has a `quarantine`, the load whose bytes may still land.

    KVFlowError
    |- InvalidInput              caller   do not retry   safe      what was passed cannot be right
    |  |- ConfigError            caller   do not retry   safe      a Config value, or what it asks for is not there
    |  |- LayoutError            caller   do not retry   safe      tensors do not match the described cache
    |  |- RequestError           caller   do not retry   safe      a request or ticket that cannot be right
    |  |  |- BlocksBusy          caller   do not retry   safe      blocks that another request is using
    |  |  |- HostBlocksBusy      caller   do not retry   safe      too few host blocks are free for another lease
    |  |  `- PromptMismatch      caller   do not retry   safe      a ticket used for another prompt than its own
    |  `- UsageError             caller   do not retry   safe      a verb called in the wrong state, loop or thread
    |- RuntimeUnavailable        engine   retry          ask       this runtime is being taken out of service
    |  |- RuntimeDraining        engine   retry          ask       it takes no new work: its owner drains it
    |  |- CacheUnregistered      engine   retry          ask       its cache is given back: it sleeps, for example
    |  `- RuntimeClosed          engine   retry          ask       its owner has closed it
    |- PeerError                 peer     do not retry   safe      another engine, or the way to it; named by `peer`
    |  |- PeerUnreachable        peer     retry          safe      refused or silent, or not asked since it was
    |  |- PeerNotReady           peer     retry          safe      it has no cache yet, or drains
    |  |- PeerRefused            peer     do not retry   safe      it answered "no", and why
    |  |- PeerIncompatible       peer     do not retry   safe      protocol or cache do not match; lists both values
    |  `- ProtocolError          peer     do not retry   safe      it answered something that is no kvflow message
    |- LoadError                 nobody   do not retry   ask       one load failed after it was accepted
    |  |- LeaseExpired           nobody   do not retry   ask       the blocks may have been reused: prefill again
    |  |- PrefillFailed          peer     retry          ask       the producer will never have all of the blocks
    |  |- Overloaded             engine   retry          ask       too many loads wait already
    |  |- TransferFailed         peer     retry          ask       the transport reported a failure
    |  |- ChecksumMismatch       peer     do not retry   ask       what was read twice is not what the producer holds
    |  `- DeadlineExceeded       nobody   retry          ask       time ran out in `phase`: give it more
    |- StoreError                engine   do not retry   ask       a save or a restore failed after it was accepted
    |  |- NotStored              nobody   do not retry   safe      nothing is stored under the key, or no more
    |  |- EntryDamaged           engine   do not retry   ask       what was stored is torn or changed; it is removed
    |  |- StoreFull              engine   retry          safe      all that could make room is being read or written
    |  `- StorageFailed          engine   retry          ask       the disk, or the way to it, has failed
    `- RuntimeBroken             kvflow   do not retry   ask       a service of the runtime died: restart the engine
       `- TransportBroken        kvflow   do not retry   ask       ... because the transport died

A group that is never raised itself (KVFlowError, PeerError, LoadError, StoreError) answers with the careful value.
Errors can be pickled: their attributes go along, but for `quarantine`, which becomes a `QuarantineNotice`; a copy keeps
it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

ErrorT = TypeVar("ErrorT", bound="KVFlowError")

ERROR_CHARS_MAX = 2000
"""Longest message of an error: what peers, tickets and other packages say is in many of them."""
_END_CHARS, _NOTE_CHARS = 500, 500
COMPUTE = "compute"
"""The phase of a load that waits for its producer to compute the prompt."""
TOKENS = ("tokens",)
"""`PromptMismatch.parts` of prompts whose tokens differ."""


def shortened(text: str, chars_max: int = ERROR_CHARS_MAX) -> str:
    """Return a text, without its middle if it is too long: its beginning says who, its end what to do."""
    if len(text) <= chars_max:
        return text
    end = min(_END_CHARS, chars_max // 4)
    left_out = f" ... (left out: {len(text) - chars_max}) ... "
    return text[: chars_max - end - len(left_out)] + left_out + text[-end:]


class Blame(enum.StrEnum):
    """Party at fault for an error."""

    CALLER = "caller"
    """Caller of kvflow: what was passed cannot be right."""
    ENGINE = "engine"
    """The engine itself: it is on its way out, or has too much to do."""
    PEER = "peer"
    """The other engine, or the network between."""
    KVFLOW = "kvflow"
    """kvflow itself, or what it runs on here."""
    NOBODY = "nobody"
    """Time ran out."""


class Quarantine(Protocol):
    """Local blocks in which bytes may still land after their load has ended."""

    @property
    def request_id(self) -> str: ...

    @property
    def block_ids(self) -> tuple[int, ...]: ...

    @property
    def safe(self) -> bool:
        """True if no byte can land in the blocks any more."""

    def settled(self) -> Any:
        """Wait until the blocks are safe: with `await` in asyncio, by the call itself in `kvflow.blocking`.

        Raises RuntimeBroken if that can never be known, because the transport died under the reads.
        """


@dataclass(frozen=True, slots=True)
class QuarantineNotice:
    """The rest of an error's `quarantine` in another process: which blocks were not safe when it was pickled."""

    request_id: str
    block_ids: tuple[int, ...]
    safe: bool

    async def settled(self) -> None:
        """Raises UsageError: only the process that owns the blocks can tell."""
        raise UsageError(f"request {self.request_id!r}: a quarantine is awaited in the process that owns its blocks")


class _MemorySafe:
    """Safety of memory: of a class, True if all its errors are memory safe; of an error, if it has no `quarantine`."""

    def __init__(self, always: bool) -> None:
        self._always = always

    def __get__(self, error: KVFlowError | None, kind: type[KVFlowError]) -> bool:
        return self._always if error is None else error.quarantine is None


class KVFlowError(Exception):
    """Base of all errors that kvflow raises on purpose."""

    blame: Blame = Blame.KVFLOW
    retryable: ClassVar[bool] = False
    """True if the same call with the same ticket may succeed later or on another engine."""
    memory_safe = _MemorySafe(False)
    """True if local blocks may be reused at once. Asked of a class: if that is so for every error of it."""

    quarantine: Quarantine | None = None
    """The load, if bytes may still land in its blocks although it has ended; await its `settled()`."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))

    def add_note(self, note: str) -> None:
        """Add a note, shortened as messages are."""
        super().add_note(shortened(note, _NOTE_CHARS))

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        held = self.quarantine
        if held is not None:
            state["quarantine"] = QuarantineNotice(held.request_id, held.block_ids, held.safe)
        return _unpickled, (type(self), self.args), state

    def __copy__(self) -> Self:
        """A copy in the same process: its quarantine, if it has one, is the load itself."""
        error = _unpickled(type(self), self.args)
        error.__dict__.update(self.__dict__)
        if hasattr(self, "__notes__"):
            error.__notes__ = list(self.__notes__)
        return error

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def _retold(self, message: str, **attributes: str) -> Self:
        """A copy with another message and some other attributes; this error is its cause."""
        error = self.__copy__()
        error.args = (shortened(message),)
        error.__dict__.update(attributes)
        error.__cause__ = self
        return error


def _unpickled(kind: type[ErrorT], arguments: tuple[Any, ...]) -> ErrorT:
    """An error as it was pickled or copied: its attributes follow, so its constructor has nothing to add."""
    error = kind.__new__(kind)
    error.args = arguments
    return error


class InvalidInput(KVFlowError):
    """The caller's input cannot be right; nothing was started and no memory was touched."""

    blame = Blame.CALLER
    memory_safe = _MemorySafe(True)


class ConfigError(InvalidInput):
    """A Config value is out of range, or what it asks for is not installed or not there.

    Correct the setting that the message names.
    """


class LayoutError(InvalidInput):
    """KV cache tensors do not match the described layout, or cannot be described.

    Correct the layer that the message names, with what was expected and found.
    """


class RequestError(InvalidInput):
    """A request or ticket is malformed, or does not fit the registered cache.

    Look for a bug, or for what has changed the ticket on its way: the message names the part.
    """

    def of_request(self, request_id: str, engine_id: str) -> Self:
        """The error as one request met it; itself if it names that request, or a ticket's field and no request."""
        what = f"request {request_id!r}"
        names_it = str(self).startswith((what, "ticket: "))
        return self if names_it else self._retold(f"{what} from {engine_id!r}: {self}")


class BlocksBusy(RequestError):
    """Blocks are in use by another request in a way that excludes this one.

    Look for blocks that were freed before their load had settled or their lease had ended.
    """


class HostBlocksBusy(RequestError):
    """A lease needs more host blocks than are free.

    Serve it once other leases have ended, or raise `host_buffer_bytes_max`.
    """


class PromptMismatch(RequestError):
    """The ticket is of another prompt.

    Look for a router that mixes tickets up, or for engines that tokenize differently. If `parts` is not
    `("tokens",)`, look for a router that takes pictures or adapters off the decode request.
    """

    def __init__(self, message: str, *, parts: tuple[str, ...] = TOKENS) -> None:
        super().__init__(message)
        self.parts = parts
        """What differs: ("tokens",); or, where the tokens agree, "pictures", "adapter" and others that prompts are
        marked with. Then the request may have lost them on its way, and its prompt must not be computed either."""


class UsageError(InvalidInput):
    """A verb was called in the wrong state, such as before registration or twice, on the wrong loop or thread, or with
    an argument that cannot be right.

    Correct the call.
    """


class RuntimeUnavailable(KVFlowError):
    """The runtime is being taken out of service by its owner; another engine may do the work."""

    blame = Blame.ENGINE
    retryable = True


class RuntimeDraining(RuntimeUnavailable):
    """The runtime drains: it finishes what it has begun and takes no new work.

    Use another engine.
    """


class CacheUnregistered(RuntimeUnavailable):
    """The runtime's cache was unregistered by its owner, and no other is registered yet.

    Use another engine, or register the cache of this one: it sleeps.
    """


class RuntimeClosed(RuntimeUnavailable):
    """The runtime was closed by its owner.

    Use another engine.
    """


class PeerError(KVFlowError):
    """Another engine, or the way to it, failed."""

    blame = Blame.PEER
    memory_safe = _MemorySafe(True)

    def __init__(
        self,
        message: str,
        *,
        peer: str,
        engine_id: str = "",
        request_id: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.peer = peer
        """Address of the peer."""
        self.engine_id = engine_id
        """Engine of the peer, as far as known."""
        self.request_id = request_id
        """Request of the load that needed the peer; "" if no load did."""
        self.retry_after_s = retry_after_s
        """Seconds for which loads from the peer fail at once; None if the next load asks the peer again."""

    def of_request(self, request_id: str, engine_id: str) -> Self:
        """The failure as one request met it: waiters that share a handshake each get an error of their own."""
        known = "" if self.engine_id else f" from {engine_id!r}"  # a message whose error knows the engine names it
        return self._retold(f"request {request_id!r}{known}: {self}", request_id=request_id, engine_id=engine_id)


class PeerUnreachable(PeerError):
    """Nobody answers at the peer's address in time, or it has failed and is not asked for a while.

    Use another peer; retry this one after `retry_after_s`. The peer or the network has failed.
    """

    retryable = True


class PeerNotReady(PeerError):
    """The peer is there, but has no cache yet or takes no new readers any more.

    Use another peer, or retry soon: this one starts, sleeps or drains.
    """

    retryable = True


class PeerRefused(PeerError):
    """The peer answered the handshake with a refusal.

    Correct the configuration that the message names; with CURVE, add the key that it names.
    """


class PeerIncompatible(PeerError):
    """The peer's protocol or cache cannot work with ours.

    Correct the configuration: the message has both values. The log warns once for each address and reason.
    """


class ProtocolError(PeerError):
    """The peer sent bytes that are no valid kvflow message.

    Check the address: another service answers there, or a broken engine.
    """


class LoadError(KVFlowError):
    """A load failed after it was accepted."""

    blame = Blame.NOBODY

    def __init__(self, message: str, *, request_id: str, peer: str) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.peer = peer

    def of_request(self, request_id: str, engine_id: str) -> Self:
        """The error as one request met it, as with a `PeerError`; itself if that is the one it names."""
        what = f"request {request_id!r}"
        return self if self.request_id == request_id else self._retold(f"{what}: {self}", request_id=request_id)


class LeaseExpired(LoadError):
    """The lease did not provably cover the whole read: it ran out, was withdrawn or was used up.

    Prefill again. If it is frequent, raise `lease_ttl_s`, or let fewer requests wait.
    """


class PrefillFailed(LoadError):
    """The producer says that it will not compute the prompt, or has offered nothing in time.

    Have another engine compute the prompt.
    """

    blame = Blame.PEER
    retryable = True


class Overloaded(LoadError):
    """No room in this engine: as many loads wait as may, or as many peers are in use or asked. Nothing was read.

    Send fewer loads (`loads_waiting_max`). If you have that many peers, raise `limits.peers_max` or
    `limits.first_contacts_max`; else look for forged tickets.
    """

    blame = Blame.ENGINE
    retryable = True


class TransferFailed(LoadError):
    """The transport reported a failure while it read.

    Retry, then prefill again: the peer or the network has failed.
    """

    blame = Blame.PEER
    retryable = True


class ChecksumMismatch(LoadError):
    """The bytes that were read differ from those that the producer holds, also after a second read.

    Compute the prompt again, and check the network and the memory of both machines: something changes bytes between
    the caches, or leased blocks are written to.
    """

    blame = Blame.PEER


class DeadlineExceeded(LoadError):
    """The request's deadline passed in `phase`. In phase "compute" the peer has not computed the prompt.

    Retry with more time; in phase "compute" have another engine compute the prompt.
    """

    retryable = True

    def __init__(self, message: str, *, request_id: str, peer: str, phase: str) -> None:
        super().__init__(message, request_id=request_id, peer=peer)
        self.phase = phase
        if phase == COMPUTE:
            self.blame = Blame.PEER


class StoreError(KVFlowError):
    """A save or a restore failed after it was accepted."""

    blame = Blame.ENGINE

    def __init__(self, message: str, *, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class NotStored(StoreError):
    """Nothing is stored under the key, or no longer: other entries needed the room.

    Compute the prompt, or load it.
    """

    blame = Blame.NOBODY
    memory_safe = _MemorySafe(True)


class EntryDamaged(StoreError):
    """The entry is torn, of something else, or not what was saved. Its file is removed.

    Compute the prompt. If it happens again, check the disk.
    """


class StoreFull(StoreError):
    """The store has no room now: entries that could make room are being read, the others written.

    Raise `Storage(bytes_max=...)`, or save less at once.
    """

    retryable = True
    memory_safe = _MemorySafe(True)


class StorageFailed(StoreError):
    """A file could not be written or read.

    Check the disk: the message has the system's reason.
    """

    retryable = True


class RuntimeBroken(KVFlowError):
    """A service task of the runtime died; `__cause__` says of what.

    Restart the engine, and report the cause.
    """


class TransportBroken(RuntimeBroken):
    """The transport can do no more work.

    Restart the engine.
    """
