"""Messages between an engine's scheduler, its connector and its workers: requests, answers, and steps.

`connector.scheduler` makes a `Step` of messages that any executor can carry, and each worker carries it out. The
workers report which requests have been received (their loads have ended) and sent (their leases have ended). One worker
also reports what peers have answered. Nothing else comes back.
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
"""Block ids of one request: a table in prompt order for each group of layers."""
GivenTables: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of a request as its engine has them: one list, or a list for each group of layers."""
TablesOf: TypeAlias = Callable[[str], GivenTables]
"""Function that takes a request id and returns all block ids of that request."""
Matched: TypeAlias = tuple[int | None, bool]
"""Number of prompt tokens that can be loaded, and True if they are loaded between steps. The number is None while it
depends on a peer's answer or another request's load: the engine has to ask again."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request of an engine's scheduler, with the facts that a connector needs."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None
    prompt_token_ids: Sequence[int] | None = None
    """Token ids of the prompt. None if the engine does not know them, or if they do not identify the prompt: then
    prompts are not compared. If the tokens identify the prompt only together with other input, for example pictures,
    they must be marked with that input (`marked_by_keys`)."""


class Sharing(enum.Enum):
    """Whether other requests of an engine may have the same ticket as a request."""

    ALONE = enum.auto()
    """No other request has the ticket."""
    SAMPLES = enum.auto()
    """Other samples of the same prompt may have the ticket, and may be added before or after this request."""
    SAMPLES_ELSEWHERE = enum.auto()
    """As `SAMPLES`; but if this engine has no other sample of the prompt, another engine uses the ticket."""


class Finished(NamedTuple):
    """Answer to the end of a request.

    With `hold_blocks`, the engine must not reuse the request's blocks until the request is reported as sent or
    received.
    """

    hold_blocks: bool
    params: dict[str, Any] | None
    """`kv_transfer_params` for the router; None if the prompt is not offered."""


class Receive(msgspec.Struct, frozen=True, kw_only=True):
    """Load what the tickets offer into the blocks of a request, which waits until it is reported as received."""

    request_id: str
    tickets: tuple[Ticket, ...]
    block_tables: BlockTables
    num_tokens: int
    """Number of tokens that the offer must have; a load of another offer fails."""
    cached_tokens: int
    """Number of prompt tokens before the first of these blocks, which are not loaded."""
    prompt: tuple[int, ...] | None = None
    """Token ids at the beginning of the prompt, if the engine knows them and the load has to compare them. Else
    None."""
    marks: tuple[Mark, ...] = ()
    """Marks of `prompt`: what else identifies it, for example pictures, with their positions."""
    release_if_failed: bool = True
    """True if a failed load releases the tickets. An abandoned load always does."""
    shared: bool = False
    """True if other requests read the same offer. Then the tickets are released only once no request needs them."""


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """Open a lease under `serve_id` of the blocks that hold a whole prompt once this step has been computed.

    Until `Step.send` no reader knows `serve_id`, so nobody can read the blocks, and `ttl_s` does not run: it is counted
    from `Step.send`. With `computed_tokens`, readers know `serve_id` already and may read at once.
    """

    request_id: str
    serve_id: str
    block_tables: BlockTables
    num_tokens: int
    ttl_s: float
    computed_tokens: int | None = None
    """For a prompt that is read while it is computed: total of computed tokens once this step has run. `block_tables`
    then has the blocks that the request has so far. None for a prompt that is complete."""
    prompt: tuple[int, ...] | None = None
    """Ids of the prompt's `num_tokens` tokens, if the engine knows them; only with `computed_tokens`."""
    marks: tuple[Mark, ...] = ()
    """Marks of `prompt`: what else identifies it, for example pictures, with their positions."""


class Grow(msgspec.Struct, frozen=True, kw_only=True):
    """Extend the lease of a prompt that readers may read while it is computed.

    `num_tokens` of its tokens are computed once this step has run. `block_tables` has the blocks to append to the
    lease.
    """

    request_id: str
    block_tables: BlockTables
    num_tokens: int


class Decline(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the readers that wait for a lease named `serve_id` that this engine will not offer it."""

    serve_id: str
    reason: str
    waiting_at: Ticket | None = None
    """The readers' pending ticket, if they wait at another engine: the message goes to that engine. Else None."""
    instead: Ticket | None = None
    """With `waiting_at`: a pending ticket of this engine, which those readers use from then on."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Stop keeping these tickets' leases open for a request, which will not read their blocks."""

    request_id: str
    tickets: tuple[Ticket, ...]
    last: bool = True
    """True if no other request needs the tickets: then their producers are notified, which ends the leases."""


class CachedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Report of consecutive blocks of one prompt that peers may read once this step has been computed."""

    parent: bytes
    """Prefix key of the block before the first of these; empty at the beginning of a prompt."""
    keys: tuple[bytes, ...]
    """For each of consecutive blocks, in prompt order: the key of the prompt's prefix that ends with that block."""
    block_tables: BlockTables
    """For each group, the block id of each key in `keys`; `NO_BLOCK` where the group needs no block."""


NO_BLOCK = -1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Ask peers for a prefix of a request's prompt, and report what they offer. The request waits for the report."""

    request_id: str
    keys: tuple[bytes, ...]
    key_tokens: int
    cached_tokens: int
    peers: tuple[str, ...]
    """Addresses of the engines to ask, one rank of each."""
    use_events: bool = False
    """True to ask also the engines that, by their KV events, have part of the prefix."""


class Step(msgspec.Struct, kw_only=True):
    """The work of one step, in the order in which a worker has to begin it."""

    reused: tuple[int, ...] = ()
    """Ids of blocks that this step will fill with something else; no peer may read them any longer."""

    send: list[str] = []
    """Ids of requests with a ticket that was given out: `Save.ttl_s` begins to count, and the engine waits for the end
    of the lease."""
    keep: dict[str, tuple[Ticket, ...]] = {}
    """Tickets of each request that waits for blocks, by request id. Their leases are kept open until the request is
    received or released. All tickets of a request are for the same prompt: if the producer of one fails, the load goes
    on with the next."""
    withdraw: list[str] = []
    """Ids of requests with a lease that must end now; the blocks may be used for something else afterwards."""
    recall: list[str] = []
    """Ids of requests with a lease that must end although readers may be reading. The step computes only once no such
    read can succeed."""
    decline: list[Decline] = []
    receive: list[Receive] = []
    abandon: list[str] = []
    """Ids of requests with a load that is no longer needed. Each is reported as received once no byte can land in its
    blocks."""
    save: list[Save] = []
    grow: list[Grow] = []
    release: list[Release] = []
    cached_blocks: list[CachedBlocks] = []
    questions: list[Question] = []
    introduce: bool = False
    """True if each worker has to introduce itself again (`ConnectorWorker.introduction`), since it may have registered
    another cache."""
