"""The words of a connector: what an engine's scheduler tells it and is told, and the step that its workers are handed.

`connector.scheduler` makes a `Step` of messages that any executor can carry, and each worker carries it out. Workers
tell the engine which requests have been received and sent, and one of them tells what peers have answered; nothing else
comes back.
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
"""Block ids for each group of the cache's layers; one table if there is one group."""
GivenTables: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of a request as its engine has them: a list, or a table for each group of layers."""
TablesOf: TypeAlias = Callable[[str], GivenTables]
"""Gives all blocks of a request, by its id."""
Matched: TypeAlias = tuple[int | None, bool]
"""Prompt tokens that can come from remote, None while that depends on another request's load: ask again. Then whether
they come between the steps."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A scheduler's request, as far as a connector has to know it."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None
    prompt_token_ids: Sequence[int] | None = None
    """None if the engine does not know them, or they do not say what the prompt is: nothing is compared then. Where
    they say it together with something else, such as pictures, they are marked with it (`marked_by_keys`)."""


class Sharing(enum.Enum):
    """Requests that have the same ticket as this one."""

    ALONE = enum.auto()
    """None: the ticket is the request's own."""
    FIRST = enum.auto()
    """Samples of the same prompt may come, or have come."""
    FOLLOWS = enum.auto()
    """As `FIRST`; if none of the samples is here the ticket is another engine's to use."""


class Finished(NamedTuple):
    """Answer to the end of a request. With `hold_blocks` its blocks stay until it is reported as sent or received."""

    hold_blocks: bool
    params: dict[str, Any] | None
    """Parameters for its router; None if its prompt is not offered."""


class Receive(msgspec.Struct, frozen=True, kw_only=True):
    """Load what the tickets offer into these blocks. The request waits until it is reported as received."""

    request_id: str
    tickets: tuple[Ticket, ...]
    block_tables: BlockTables
    num_tokens: int
    """Tokens that the offer has to be of."""
    cached_tokens: int
    """Tokens of the prompt in front of the blocks."""
    prompt: tuple[int, ...] | None = None
    """Ids of the prompt's first tokens, if the engine knows them and they are still to be compared."""
    marks: tuple[Mark, ...] = ()
    """The marks of `prompt`."""
    release_if_failed: bool = True
    """True if the offer is given back when the load fails; when the load is abandoned it always is."""
    shared: bool = False
    """True if other requests read what the ticket offers, too: it is released when none of them needs it any more."""


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """Open a lease under `serve_id`: its blocks hold a whole prompt once this step has been computed.

    The lease is open before its ticket is out, so it keeps no reader waiting. Nobody can read it before: its `serve_id`
    is a secret until then. Its `ttl_s` begins with `Step.send`, however long the step takes.
    """

    request_id: str
    serve_id: str
    block_tables: BlockTables
    num_tokens: int
    ttl_s: float
    computed_tokens: int | None = None
    """Tokens that are there after this step, for a prompt that is read while it is computed. Its `serve_id` is known
    already, and `block_tables` are those that it has by now."""
    prompt: tuple[int, ...] | None = None
    """The ids of the `num_tokens` tokens, if the engine knows them; with `computed_tokens` only."""
    marks: tuple[Mark, ...] = ()
    """The marks of `prompt`."""


class Grow(msgspec.Struct, frozen=True, kw_only=True):
    """Offer more of a prompt after this step, in the blocks that it has and in these, which follow them."""

    request_id: str
    block_tables: BlockTables
    num_tokens: int


class Decline(msgspec.Struct, frozen=True, kw_only=True):
    """Tell those who wait for this name that nothing will be offered under it here."""

    serve_id: str
    reason: str
    at: Ticket | None = None
    """The rendezvous of readers that wait at another engine: they are told there."""
    instead: Ticket | None = None
    """With `at`, the same with this engine: there they go on."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the producers of these tickets that the request reads nothing for them any more."""

    request_id: str
    tickets: tuple[Ticket, ...]
    last: bool = True
    """True if no other request does, either; else nobody is told."""


class CachedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that hold more of a prompt once this step has been computed, for peers that ask for its prefix."""

    parent: bytes
    """The key of the block before the first one; empty at the beginning of a prompt."""
    keys: tuple[bytes, ...]
    """The key of each block, in prompt order."""
    block_tables: BlockTables
    """The block of each key, for each group; `NO_BLOCK` where the group has none."""


NO_BLOCK = -1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Ask peers for a prompt's prefix, and report what they offer; the request waits for that."""

    request_id: str
    keys: tuple[bytes, ...]
    key_tokens: int
    cached_tokens: int
    peers: tuple[str, ...]
    """Addresses, one of each engine."""
    hinted: bool = False
    """True if engines whose KV events show that they have some of it are asked as well."""


class Step(msgspec.Struct, kw_only=True):
    """One step's work, in the order in which a worker has to begin it."""

    reused: tuple[int, ...] = ()
    """Blocks that will hold something else from this step on: no peer may read there any more."""

    send: list[str] = []
    """Requests whose tickets are out: the time of their leases begins. The engine waits until they are sent."""
    keep: dict[str, tuple[Ticket, ...]] = {}
    """Tickets of each request that waits for blocks: their leases are kept until it is received or released. Several
    are of one prompt, each for when the source of the one before fails."""
    withdraw: list[str] = []
    """Requests whose leases end now: their blocks may be used for something else."""
    recall: list[str] = []
    """Requests whose leases end although they may be being read: the step's own work begins when no read can succeed
    any more."""
    decline: list[Decline] = []
    receive: list[Receive] = []
    abandon: list[str] = []
    """Requests whose loads nobody wants any more. Each is reported as received once no byte can land."""
    save: list[Save] = []
    grow: list[Grow] = []
    release: list[Release] = []
    cached_blocks: list[CachedBlocks] = []
    questions: list[Question] = []
    introduce: bool = False
    """True if each worker has to say anew who it is (`ConnectorWorker.introduction`): its cache may be another one."""
