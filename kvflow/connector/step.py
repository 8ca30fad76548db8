"""Values that pass between an engine's scheduler, its connector and its workers: requests, answers, and steps.

`connector.scheduler` makes a `Step` of messages that any executor can carry, and each worker carries it out. The
workers report which requests have been received and sent. One worker also reports what peers have answered. Nothing
else comes back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvflow.core.protocol.prompts import Mark
from kvflow.core.protocol.ticket import Ticket

BlockTables: TypeAlias = tuple[tuple[int, ...], ...]
"""Block ids as one table for each group of layers."""
GivenTables: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of a request as its engine has them: a list, or a table for each group of layers."""
TablesOf: TypeAlias = Callable[[str], GivenTables]
"""Function that returns all blocks of a request, by request id."""
Matched: TypeAlias = tuple[int | None, bool]
"""Number of prompt tokens that can be loaded, and whether they are loaded between steps. The number is None while it
depends on another request's load; ask again."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request of an engine's scheduler, with the facts that a connector needs."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None
    prompt_token_ids: Sequence[int] | None = None
    """Token ids of the prompt. None if the engine does not know them, or if they do not identify the prompt: then
    nothing is compared. If they identify the prompt only together with other input, for example pictures, they must be
    marked with it (`marked_by_keys`)."""


class Sharing(enum.Enum):
    """Whether other requests have the same ticket as this request."""

    ALONE = enum.auto()
    """No other request has the ticket."""
    FIRST = enum.auto()
    """Samples of the same prompt may have the ticket, before or after this request."""
    FOLLOWS = enum.auto()
    """As `FIRST`; but if this engine has none of the other samples, another engine uses the ticket."""


class Finished(NamedTuple):
    """Answer to the end of a request. With `hold_blocks`, its blocks are held until it is reported sent or received."""

    hold_blocks: bool
    params: dict[str, Any] | None
    """Parameters for the router; None if the prompt is not offered."""


class Receive(msgspec.Struct, frozen=True, kw_only=True):
    """Load the offer of the tickets into these blocks. The request waits until it is reported as received."""

    request_id: str
    tickets: tuple[Ticket, ...]
    block_tables: BlockTables
    num_tokens: int
    """Number of tokens that the offer must have."""
    cached_tokens: int
    """Prompt tokens before these blocks, which are not loaded."""
    prompt: tuple[int, ...] | None = None
    """Ids of the prompt's first tokens, if the engine knows them and the load still has to compare them."""
    marks: tuple[Mark, ...] = ()
    """Marks of `prompt`."""
    release_if_failed: bool = True
    """True if a failed load releases the tickets. An abandoned load always does."""
    shared: bool = False
    """True if other requests read the same offer. Then its tickets are released only when no request needs them."""


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """Open a lease under `serve_id`: its blocks hold a whole prompt once this step has been computed.

    The lease is opened before its ticket is given out, so no reader waits for it. Until then `serve_id` is a secret, so
    nobody can read the blocks. `ttl_s` is counted from `Step.send`, however long the step takes.
    """

    request_id: str
    serve_id: str
    block_tables: BlockTables
    num_tokens: int
    ttl_s: float
    computed_tokens: int | None = None
    """For a prompt that is read while it is computed: number of tokens that are computed after this step. Readers know
    its `serve_id` already, and `block_tables` has the blocks that the request has so far. Else None."""
    prompt: tuple[int, ...] | None = None
    """Ids of the `num_tokens` tokens, if the engine knows them; only with `computed_tokens`."""
    marks: tuple[Mark, ...] = ()
    """Marks of `prompt`."""


class Grow(msgspec.Struct, frozen=True, kw_only=True):
    """Offer `num_tokens` tokens of a prompt after this step. `block_tables` has the blocks to append to its lease."""

    request_id: str
    block_tables: BlockTables
    num_tokens: int


class Decline(msgspec.Struct, frozen=True, kw_only=True):
    """Tell readers that wait for `serve_id` that this engine will not offer it."""

    serve_id: str
    reason: str
    at: Ticket | None = None
    """Pending ticket of readers that wait at another engine; the message goes there."""
    instead: Ticket | None = None
    """With `at`: a pending ticket of this engine, which those readers use instead."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Stop keeping the leases of these tickets for a request, which will not read their blocks."""

    request_id: str
    tickets: tuple[Ticket, ...]
    last: bool = True
    """True if no other request needs the tickets: then they are released at their producers."""


class CachedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that hold more of a prompt once this step has been computed, for peers that ask for its prefix."""

    parent: bytes
    """Key of the block before the first one; empty at the beginning of a prompt."""
    keys: tuple[bytes, ...]
    """Key of each block, in prompt order."""
    block_tables: BlockTables
    """For each group, the block of each key; `NO_BLOCK` where the group has none."""


NO_BLOCK = -1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Ask peers for a prefix of a prompt, and report their offers. The request waits for the report."""

    request_id: str
    keys: tuple[bytes, ...]
    key_tokens: int
    cached_tokens: int
    peers: tuple[str, ...]
    """Addresses of the peers to ask, one for each engine."""
    hinted: bool = False
    """True if engines that KV events show to have a part of the prefix are asked, too."""


class Step(msgspec.Struct, kw_only=True):
    """The work of one step, in the order in which a worker has to begin it."""

    reused: tuple[int, ...] = ()
    """Blocks that will hold something else after this step; no peer may read them."""

    send: list[str] = []
    """Requests with a ticket that has been given out: the time of the lease starts, and the engine waits for its
    end."""
    keep: dict[str, tuple[Ticket, ...]] = {}
    """Tickets of each request that waits for blocks. Their leases are kept until the request is received or released.
    Several tickets are for the same prompt: if the source of one fails, the load goes on with the next."""
    withdraw: list[str] = []
    """Requests with a lease that must end now; their blocks may be used for something else."""
    recall: list[str] = []
    """Requests with a lease that must end although readers may be reading. The step's own work begins once no such read
    can succeed."""
    decline: list[Decline] = []
    receive: list[Receive] = []
    abandon: list[str] = []
    """Requests with a load that is no longer needed. Each is reported as received once no byte can land in its
    blocks."""
    save: list[Save] = []
    grow: list[Grow] = []
    release: list[Release] = []
    cached_blocks: list[CachedBlocks] = []
    questions: list[Question] = []
    introduce: bool = False
    """True if each worker has to introduce itself again (`ConnectorWorker.introduction`), since its cache may be
    another one."""
