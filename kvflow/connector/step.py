"""Messages between an engine's scheduler, its connector and its workers: requests, answers, and steps.

`connector.scheduler` makes a `Step` for each step of the engine. Any executor can carry it to the workers, and each
worker does the work in it. The workers report which requests have been received (their loads have ended) and sent
(their leases have ended). One worker also reports the answers of peers. Workers report nothing else.
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
"""Block ids of one request: for each group of layers, a tuple in prompt order."""
GivenTables: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of a request as the engine gives them: one list, or with several groups of layers, one list for each."""
TablesOf: TypeAlias = Callable[[str], GivenTables]
"""Function that takes a request id and returns the ids of all blocks that the request has."""
Matched: TypeAlias = tuple[int | None, bool]
"""Number of prompt tokens that can be loaded, and True if the load runs while the engine goes on with other steps. The
number is None if it is not known yet, before a peer's answer or another request's load: the engine has to ask again."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The facts about a request of an engine's scheduler that a connector needs."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None
    prompt_token_ids: Sequence[int] | None = None
    """Token ids of the prompt, to compare with the producer's prompt. If the prompt has other input, too, for example
    pictures, the token ids must be marked with that input (`marked_by_keys`). None if the engine does not know the
    token ids, or cannot mark them: then prompts are not compared."""


class Sharing(enum.Enum):
    """Says whether other requests may have the same ticket as a request."""

    ALONE = enum.auto()
    """No other request has the ticket."""
    SAMPLES = enum.auto()
    """Other samples of the same prompt may have the ticket, and may be added before or after this request."""
    SAMPLES_ELSEWHERE = enum.auto()
    """Other samples of the same prompt may have the ticket. If this engine has none yet, another engine uses the
    ticket, and the request is refused."""


class Finished(NamedTuple):
    """The connector's answer when the engine has ended a request.

    If `hold_blocks`, the engine must not reuse the request's blocks until the workers report the request as sent or
    received.
    """

    hold_blocks: bool
    params: dict[str, Any] | None
    """`kv_transfer_params` for the router; None if the prompt is not offered."""


class Receive(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: load the blocks that the tickets offer into a request's blocks.

    The request waits until all workers report it as received. If the load with one ticket fails, the next is tried.
    """

    request_id: str
    tickets: tuple[Ticket, ...]
    block_tables: BlockTables
    num_tokens: int
    """Number of tokens that the offer must have. If the producer offers another number, the load fails."""
    cached_tokens: int
    """Number of tokens at the beginning of the prompt that are not loaded, since the engine has them already."""
    prompt: tuple[int, ...] | None = None
    """Token ids at the beginning of the prompt, for the load to compare with the producer's prompt. None if they need
    not be compared, or if the engine does not know them."""
    marks: tuple[Mark, ...] = ()
    """Other input that belongs to `prompt`, for example pictures, with their positions."""
    release_if_failed: bool = True
    """True to release the tickets if the load fails. If the load is abandoned, they are always released."""
    shared: bool = False
    """True if other requests may use the same tickets. Then the load does not release the tickets: the scheduler does,
    once no request needs them."""


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: open a lease with the name `serve_id` for the blocks of a prompt.

    Once this step has been computed, the blocks hold the whole prompt. Until `Step.send`, no reader knows `serve_id`,
    so no reader can read the blocks; `ttl_s` is counted from `Step.send`. If `computed_tokens` is not None, the prompt
    is still being computed, and readers know `serve_id` and may read at once.
    """

    request_id: str
    serve_id: str
    block_tables: BlockTables
    num_tokens: int
    ttl_s: float
    computed_tokens: int | None = None
    """For a prompt that readers may read while it is computed: its total of computed tokens once this step has run.
    `block_tables` then has only the blocks that the request has so far. None for a prompt that this step completes."""
    prompt: tuple[int, ...] | None = None
    """Token ids of the prompt, `num_tokens` in number, for readers with a pending ticket to compare. None if
    `computed_tokens` is None, or if the engine does not know the token ids."""
    marks: tuple[Mark, ...] = ()
    """Other input that belongs to `prompt`, for example pictures, with their positions."""


class Grow(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: extend the lease of a prompt that readers may read while it is computed.

    `block_tables` has the blocks to append to the lease. `num_tokens` is the total of the prompt's computed tokens once
    this step has run.
    """

    request_id: str
    block_tables: BlockTables
    num_tokens: int


class Decline(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: notify the readers that wait for the lease named `serve_id` that it will not be opened."""

    serve_id: str
    reason: str
    waiting_at: Ticket | None = None
    """The readers' pending ticket, if they wait at another engine, which is then notified. None if they wait here."""
    instead: Ticket | None = None
    """If `waiting_at` is given: a pending ticket of this engine, with which those readers go on waiting here."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: stop keeping the leases of `tickets` open, since a request will not read their blocks."""

    request_id: str
    tickets: tuple[Ticket, ...]
    last: bool = True
    """True if no other request needs the tickets. Then the producers are notified and end the leases."""


class CachedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Report to the workers: consecutive blocks of a prompt, which peers may read once this step has been computed."""

    parent: bytes
    """Key of the prompt's prefix that ends before these blocks; empty if they begin the prompt."""
    keys: tuple[bytes, ...]
    """For each block, in prompt order: the key of the prompt's prefix that ends with that block."""
    block_tables: BlockTables
    """For each group, one block id for each key in `keys`; `NO_BLOCK` where the group needs no block."""


NO_BLOCK = -1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Work for one worker: ask peers for a prefix of a request's prompt, and report the tickets in their answers.

    The request waits for the report. `keys` are the prompt's prefix keys, one for each `key_tokens` tokens.
    `cached_tokens` is the number of tokens that this engine has already.
    """

    request_id: str
    keys: tuple[bytes, ...]
    key_tokens: int
    cached_tokens: int
    peers: tuple[str, ...]
    """Addresses to ask: the side channel of one rank of each engine."""
    use_events: bool = False
    """True to ask, in addition to `peers`, the engines that have part of the prefix by their KV events."""


class Step(msgspec.Struct, kw_only=True):
    """The connector's work in one step of the engine, for each worker, in the order in which a worker begins it."""

    reused: tuple[int, ...] = ()
    """Ids of blocks that held prompts' prefixes and that this step overwrites, so that peers must stop reading them."""

    send: list[str] = []
    """Ids of requests with tickets that the router gets now: the leases' `Save.ttl_s` begins to count, and the engine
    waits for the end of the leases."""
    keep: dict[str, tuple[Ticket, ...]] = {}
    """Tickets of each new request that waits for blocks, by request id. Their leases are renewed until the request is
    received or the tickets are released. All tickets of a request are for the same prompt: if a load with one ticket
    fails, the next is tried."""
    withdraw: list[str] = []
    """Ids of requests with leases that must end, because their blocks will be used for something else."""
    recall: list[str] = []
    """Ids of requests with leases that must end before the step computes, although readers may be reading. The step
    waits until no read of their blocks can succeed."""
    decline: list[Decline] = []
    receive: list[Receive] = []
    abandon: list[str] = []
    """Ids of requests with loads that are no longer needed and must be cancelled. A worker reports each request as
    received once no byte can land in the request's blocks."""
    save: list[Save] = []
    grow: list[Grow] = []
    release: list[Release] = []
    cached_blocks: list[CachedBlocks] = []
    questions: list[Question] = []
    introduce: bool = False
    """True if each worker has to send a new ticket that names its rank (`ConnectorWorker.introduction`), since it may
    have registered its cache again."""
