"""Every error a user of kvflow can meet, as one tree.

Each class answers three questions by attributes: `blame`, which party is at fault; `retryable`, whether the same call
with the same ticket may succeed later or on another engine; `memory_safe`, whether the local blocks may be reused
immediately. An error is memory safe unless it has a `quarantine`, the ended load with bytes that may still land. "ask"
below: this differs from error to error, so read it from the error; the class has False.

    KVFlowError
    |- InvalidInput              caller   do not retry   safe      the caller's input is invalid
    |  |- ConfigError            caller   do not retry   safe      a Config value is invalid or not supported here
    |  |- LayoutError            caller   do not retry   safe      tensors do not match the described cache
    |  |- RequestError           caller   do not retry   safe      a request or ticket is invalid
    |  |  |- BlocksBusy          caller   do not retry   safe      blocks that another request is using
    |  |  |- PromptMismatch      caller   do not retry   safe      the ticket is for another prompt
    |  |  `- WeightsMismatch     caller   do not retry   safe      the blocks were computed with other weights
    |  `- UsageError             caller   do not retry   safe      a method called in the wrong state, loop or thread
    |- RuntimeUnavailable        engine   retry          ask       this runtime is being taken out of service
    |  |- RuntimeDraining        engine   retry          ask       the owner drains this runtime: no new work
    |  |- CacheUnregistered      engine   retry          ask       its cache is unregistered, for example in sleep
    |  `- RuntimeClosed          engine   retry          ask       the owner has closed this runtime
    |- PeerError                 peer     do not retry   safe      another engine or the network failed; see `peer`
    |  |- PeerUnreachable        peer     retry          safe      the peer gave no answer, or failed shortly before
    |  |- PeerNotReady           peer     retry          safe      the peer has no cache yet, drains, or is busy
    |  |- PeerRefused            peer     do not retry   safe      the peer refused, and said why
    |  |- PeerIncompatible       peer     do not retry   safe      protocol or cache do not match; lists both values
    |  `- ProtocolError          peer     do not retry   safe      the answer is not a kvflow message
    |- LoadError                 nobody   do not retry   ask       one load failed after it was accepted
    |  |- LeaseExpired           nobody   do not retry   ask       the blocks may have been reused: prefill again
    |  |- PrefillFailed          peer     retry          ask       the producer will not complete the prompt
    |  |- Overloaded             engine   retry          ask       this engine is at one of its limits: it is full
    |  |  `- HostBlocksBusy      engine   retry          ask       too few host blocks are free for another lease
    |  |- TransferFailed         peer     retry          ask       the transport reported a failure
    |  |- ChecksumMismatch       peer     do not retry   ask       bytes differ from the producer's, read twice
    |  `- DeadlineExceeded       nobody   retry          ask       time ran out in `phase`
    |- StoreError                engine   do not retry   ask       a save or a restore failed after it was accepted
    |  |- NotStored              nobody   do not retry   safe      no entry under the key, or it was evicted
    |  |- EntryDamaged           engine   do not retry   ask       the entry is torn or changed, and is removed
    |  |- StoreFull              engine   retry          safe      full, and no entry can be evicted now
    |  `- StorageFailed          engine   retry          ask       a file could not be read or written
    `- RuntimeBroken             kvflow   do not retry   ask       a service of the runtime died: restart the engine
       `- TransportBroken        kvflow   do not retry   ask       ... because the transport died

A base class that is never raised (KVFlowError, PeerError, LoadError, StoreError) has the cautious values. Errors can be
pickled with their attributes; `quarantine` becomes a `QuarantineNotice`. A copy keeps its `quarantine`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

ErrorT = TypeVar("ErrorT", bound="KVFlowError")

ERROR_CHARS_MAX = 2000
"""Maximum number of characters of an error message, which may contain text from peers, tickets and packages."""
_END_CHARS, _NOTE_CHARS = 500, 500
_SECRET = re.compile(r"(#|lease_id\W{1,6})[0-9a-f]{16,}|(~kvflow~)[\w=-]+")
COMPUTE = "compute"
"""Phase (`DeadlineExceeded.phase`) in which a load waits for its producer to compute the prompt."""
TOKENS = ("tokens",)
"""Value of `PromptMismatch.parts` if the prompts have different tokens."""


def without_secrets(text: str) -> str:
    """Return `text` with "..." in place of each secret.

    Secrets are the end of a secret request id (`kvflow.secret_id`), a lease id after its field's name, and the copy of
    a ticket in a request id (`core.protocol.spare`).
    """
    return _SECRET.sub(r"\1\2...", text)


def shortened(text: str, chars_max: int = ERROR_CHARS_MAX) -> str:
    """Return `text` without secrets, and without its middle if it is longer than `chars_max` characters.

    A message begins with the request and ends with the remedy, so both are kept.
    """
    text = without_secrets(text)
    if len(text) <= chars_max:
        return text
    end = min(_END_CHARS, chars_max // 4)
    left_out = f" ... (left out: {len(text) - chars_max}) ... "
    return text[: chars_max - end - len(left_out)] + left_out + text[-end:]


class Blame(enum.StrEnum):
    """The party at fault for an error (`KVFlowError.blame`)."""

    CALLER = "caller"
    """The code that calls kvflow: it has passed invalid input."""
    ENGINE = "engine"
    """This engine: it is shutting down, or overloaded."""
    PEER = "peer"
    """The other engine, or the network to it."""
    KVFLOW = "kvflow"
    """kvflow, or the software that kvflow uses on this machine."""
    NOBODY = "nobody"
    """No party, such as when time ran out."""


class Quarantine(Protocol):
    """A load that has ended while bytes may still land in its local blocks."""

    @property
    def request_id(self) -> str:
        """Request id of the ended load."""
        ...

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Ids of the local blocks that the load was to fill."""
        ...

    @property
    def safe(self) -> bool:
        """True if no further byte can land in the blocks."""

    def settled(self) -> Any:
        """Wait until no further byte can land in the blocks.

        In asyncio await the result of the call; in `kvflow.blocking` the call itself waits.

        Raises RuntimeBroken if this can never be known, because the transport died during the reads.
        """


@dataclass(frozen=True, slots=True)
class QuarantineNotice:
    """Replacement for an error's `quarantine` in a process that got the error by pickle.

    `safe` is the value at the time of pickling.
    """

    request_id: str
    block_ids: tuple[int, ...]
    safe: bool

    def __repr__(self) -> str:
        return f"<QuarantineNotice {without_secrets(self.request_id)} {'safe' if self.safe else 'quarantined'}>"

    async def settled(self) -> None:
        """Raise UsageError: only the process that owns the blocks can wait for them."""
        raise UsageError(f"request {self.request_id!r}: a quarantine is awaited in the process that owns its blocks")


class _MemorySafe:
    """Descriptor of the attribute `memory_safe`.

    Read from an error: True if the error has no `quarantine`. Read from a class: True if all errors of the class are
    safe.
    """

    def __init__(self, always: bool) -> None:
        self._always = always

    def __get__(self, error: KVFlowError | None, kind: type[KVFlowError]) -> bool:
        return self._always if error is None else error.quarantine is None


class KVFlowError(Exception):
    """Base class of all errors that kvflow raises deliberately."""

    blame: Blame = Blame.KVFLOW
    retryable: ClassVar[bool] = False
    """True if the same call with the same ticket may succeed later or on another engine."""
    memory_safe = _MemorySafe(False)
    """True if the local blocks of the failed load may be reused immediately. Read from a class: True if this holds for
    all errors of the class.
    """

    quarantine: Quarantine | None = None
    """The failed load if bytes may still land in its local blocks (then await `quarantine.settled()`), else None."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))

    def add_note(self, note: str) -> None:
        """Add `note` to the error. If `note` is too long, leave out the middle of the note."""
        super().add_note(shortened(note, _NOTE_CHARS))

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        held = self.quarantine
        if held is not None:
            state["quarantine"] = QuarantineNotice(held.request_id, held.block_ids, held.safe)
        return _unpickled, (type(self), self.args), state

    def __copy__(self) -> Self:
        """Return a copy with the same `quarantine`. (A pickled copy gets a `QuarantineNotice`.)"""
        error = _unpickled(type(self), self.args)
        error.__dict__.update(self.__dict__)
        if hasattr(self, "__notes__"):
            error.__notes__ = list(self.__notes__)
        return error

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def _with_message(self, message: str, **attributes: str) -> Self:
        """Return a copy with another `message` and the given `attributes`. The copy's `__cause__` is this error."""
        error = self.__copy__()
        error.args = (shortened(message),)
        error.__dict__.update(attributes)
        error.__cause__ = self
        return error


def _unpickled(kind: type[ErrorT], arguments: tuple[Any, ...]) -> ErrorT:
    """Return a new error of class `kind` without calling the constructor. The caller sets the attributes."""
    error = kind.__new__(kind)
    error.args = arguments
    return error


class InvalidInput(KVFlowError):
    """The caller's input is invalid. Nothing was started and no memory was touched."""

    blame = Blame.CALLER
    memory_safe = _MemorySafe(True)

    def of_request(self, request_id: str, engine_id: str) -> Self:
        """Return this error if its message names the request or a ticket's field; else a copy naming the request."""
        what = f"request {request_id!r}"
        names_it = str(self).startswith((what, "ticket: "))
        return self if names_it else self._with_message(f"{what} from {engine_id!r}: {self}")


class ConfigError(InvalidInput):
    """A Config value is out of range, or names something that is not installed or not available.

    Correct the setting that the message names.
    """


class LayoutError(InvalidInput):
    """KV cache tensors do not match the described layout, cannot be described, or have moved since their registration.

    Correct the layer that the message names; the message has the expected and the found value.
    """


class RequestError(InvalidInput):
    """A request or ticket is malformed, or does not fit the registered cache.

    Look for a bug, or for a router that changes tickets. The message names the invalid part.
    """


class BlocksBusy(RequestError):
    """Blocks of the request are leased, being loaded or quarantined, so this request cannot use them.

    Look for blocks that the engine freed before their load had settled or their lease had ended.
    """


class PromptMismatch(RequestError):
    """The ticket is for another prompt.

    Look for a router that mixes tickets up, or for engines that tokenize differently. If `parts` is not
    `("tokens",)`, look for a router that drops pictures or adapters from the decode request.
    """

    def __init__(self, message: str, *, parts: tuple[str, ...] = TOKENS) -> None:
        super().__init__(message)
        self.parts = parts
        """Inputs that differ: ("tokens",); or, if the tokens are equal, other inputs, such as "pictures" or "adapter".
        In the second case the local request may have lost these inputs on its way to this engine, so do not compute
        the prompt here in place of the load.
        """


class WeightsMismatch(RequestError):
    """The ticket's blocks were computed with another version of the weights than this engine has.

    Look for an engine that was given new weights, or told of them (`Runtime.set_weights`), before or after the others.
    Compute the prompt here, or prefill it again on an engine of the same weights. The message has both versions.
    """


class UsageError(InvalidInput):
    """A method was called in the wrong state, on the wrong event loop or thread, or with an invalid argument.

    Correct the call; for example, register a cache first.
    """


class RuntimeUnavailable(KVFlowError):
    """The runtime is being taken out of service. Another engine may do the work."""

    blame = Blame.ENGINE
    retryable = True


class RuntimeDraining(RuntimeUnavailable):
    """The runtime drains: it finishes work in progress and refuses new work.

    Use another engine.
    """


class CacheUnregistered(RuntimeUnavailable):
    """The runtime's cache was unregistered, and no other cache is registered yet.

    Use another engine, or register a cache with this runtime again.
    """


class RuntimeClosed(RuntimeUnavailable):
    """The runtime was closed.

    Use another engine.
    """


class PeerError(KVFlowError):
    """Another engine, or the network to it, failed."""

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
        """Address of the peer's side channel."""
        self.engine_id = engine_id
        """Engine id of the peer; "" if it is not known."""
        self.request_id = request_id
        """Request id of the load that needed the peer; "" if no load did."""
        self.retry_after_s = retry_after_s
        """Seconds for which loads from the peer fail without contacting it; None if the next load contacts it."""

    def of_request(self, request_id: str, engine_id: str) -> Self:
        """Return a copy of this error that names the request and the peer's engine.

        Loads that share a handshake each raise their own copy.
        """
        known = "" if self.engine_id else f" from {engine_id!r}"  # if the error has the id, its message has it
        return self._with_message(f"request {request_id!r}{known}: {self}", request_id=request_id, engine_id=engine_id)


class PeerUnreachable(PeerError):
    """No engine answered at the peer's address in time, or the peer failed before and is not contacted for a while.

    Use another peer, or retry this peer after `retry_after_s`. The peer or the network has failed.
    """

    retryable = True


class PeerNotReady(PeerError):
    """The peer runs, but has no cache yet, refuses new readers, or is asked too often.

    Use another peer, or retry soon: this peer is starting, sleeping (its cache is unregistered), draining or busy.
    """

    retryable = True


class PeerRefused(PeerError):
    """The peer answered the handshake with a refusal.

    Correct the configuration that the message names. With CURVE, add the key that the message names.
    """


class PeerIncompatible(PeerError):
    """The peer's protocol or cache is incompatible with this engine's.

    Correct the configuration: the message has both sides' values. Each address and reason is logged once, as a warning.
    """


class ProtocolError(PeerError):
    """The peer sent bytes that are not a valid kvflow message.

    Check the address: another service or a broken engine answers there.
    """


class LoadError(KVFlowError):
    """A load failed after it was accepted."""

    blame = Blame.NOBODY

    def __init__(self, message: str, *, request_id: str, peer: str) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.peer = peer

    def of_request(self, request_id: str, engine_id: str) -> Self:
        """Return this error if it is about request `request_id`, else a copy that names the request."""
        what = f"request {request_id!r}"
        return self if self.request_id == request_id else self._with_message(f"{what}: {self}", request_id=request_id)


class LeaseExpired(LoadError):
    """There is no proof that the lease covered the whole read: the lease expired, was revoked, or ended because other
    readers had reported their reads, so that the producer counted the lease as fully read.

    Prefill again. If this is frequent, raise `lease_ttl_s`, or let fewer requests wait between prefill and load, or see
    whether the reader's machine is paused.
    """


class PrefillFailed(LoadError):
    """The producer has reported that it will not compute the prompt, or has not offered the blocks in time.

    Have another engine compute the prompt.
    """

    blame = Blame.PEER
    retryable = True


class Overloaded(LoadError):
    """This engine is at a limit, which the message names: for open leases, waiting loads, saves and restores, peers in
    use, or first contacts to peers. Nothing was read or offered.

    Use another engine, or retry once other work has ended. If this is frequent, send less, or raise the limit. If there
    are not that many engines as peers, look for forged tickets.
    """

    blame = Blame.ENGINE
    retryable = True


class HostBlocksBusy(Overloaded):
    """A lease needs more host blocks (blocks in host buffers, `Config.staging`) than are free.

    Serve the request once other leases have ended, or on another engine, or raise `host_buffer_bytes_max`.
    """


class TransferFailed(LoadError):
    """The transport reported a failure during a read.

    Retry, then prefill again. The peer or the network has failed.
    """

    blame = Blame.PEER
    retryable = True


class ChecksumMismatch(LoadError):
    """The bytes that were read differ from the producer's bytes, also after a second read.

    Compute the prompt again, and check the network and the memory of both machines: bytes change on the way, or an
    engine writes to leased blocks.
    """

    blame = Blame.PEER


class DeadlineExceeded(LoadError):
    """The load's deadline passed in `phase`. In phase "compute" the producer has not yet computed the prompt.

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
    """The store (`kvflow.storage`) has no entry under the key, or the entry was evicted.

    Compute the prompt, or load it from a producer.
    """

    blame = Blame.NOBODY
    memory_safe = _MemorySafe(True)


class EntryDamaged(StoreError):
    """The store's entry is incomplete, is for another cache or key, or differs from the saved bytes.

    The file is removed.

    Compute the prompt. If it happens again, check the disk.
    """


class StoreFull(StoreError):
    """The store is full: entries that could be evicted are being read or written.

    Raise `Storage(bytes_max=...)`, or save fewer blocks at the same time.
    """

    retryable = True
    memory_safe = _MemorySafe(True)


class StorageFailed(StoreError):
    """A file of the store could not be written or read.

    Check the disk. The message has the system's reason.
    """

    retryable = True


class RuntimeBroken(KVFlowError):
    """A service task of the runtime died; `__cause__` is its error.

    Restart the engine, and report the cause.
    """


class TransportBroken(RuntimeBroken):
    """The transport has failed for good.

    Restart the engine.
    """
