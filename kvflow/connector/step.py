"""Messages between an engine's scheduler, its connector and its workers: requests, answers, and steps.

For each step of the engine, `connector.scheduler` makes a `Step`. Any executor can carry it to the workers. They report
which requests are received (their loads have ended) or sent (their leases have ended); one worker also reports peers'
answers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvflow.checks import hides_secrets
from kvflow.core.protocol.prompts import Mark
from kvflow.core.protocol.ticket import Ticket

BlockTables: TypeAlias = tuple[tuple[int, ...], ...]
"""Block ids of one request: one tuple for each group of layers, in prompt order."""
GivenTables: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of a request as the engine gives them: one list, or with several groups, one list for each group."""
TablesOf: TypeAlias = Callable[[str], GivenTables]
"""Function that takes a request id and returns the ids of all blocks that the request has."""
Matched: TypeAlias = tuple[int | None, bool]
"""Number of prompt tokens that can be loaded, and True if the load runs while the engine goes on with other steps. If
the number is None, it depends on an answer or a load that is not finished: ask again."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What a connector needs to know about a request of the engine's scheduler."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None
    prompt_token_ids: Sequence[int] | None = None
    """Token ids of the prompt, to compare with the producer's prompt. Where a picture or other input begins, a hash of
    token id and input must replace the token id (`marked_by_keys`). None if the engine does not know the ids or the
    input: then prompts are not compared."""


class Sharing(enum.Enum):
    """Whether other requests may have the same ticket as a request."""

    ALONE = enum.auto()
    SAMPLES = enum.auto()
    """Other samples of the same prompt may have the ticket, and may be added earlier or later."""
    SAMPLES_ELSEWHERE = enum.auto()
    """For samples other than the first, if the samples may be on several engines. If no earlier request of this engine
    has the ticket, the request is refused, because the engine with the first sample uses the ticket."""


class Finished(NamedTuple):
    """The connector's answer when the engine has ended a request.

    `hold_blocks`: the engine must not reuse the request's blocks until the workers report the request as sent or
    received.
    """

    hold_blocks: bool
    params: dict[str, Any] | None
    """`kv_transfer_params` for the router; None if the prompt is not offered."""


class Receive(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: load the blocks that the tickets offer into a request's blocks.

    The request waits until all workers have received the blocks. If the load with one ticket fails, the next ticket is
    tried.
    """

    request_id: str
    tickets: tuple[Ticket, ...]
    block_tables: BlockTables
    num_tokens: int
    """Number of tokens that the offer must have; otherwise the load fails."""
    cached_tokens: int
    """Number of tokens at the beginning of the prompt that the engine already has, and that are not loaded."""
    prompt: tuple[int, ...] | None = None
    """Token ids at the beginning of the prompt, to compare with the producer's prompt. None if no comparison is needed,
    or if the engine does not know the ids."""
    marks: tuple[Mark, ...] = ()
    """Other input of `prompt`, for example pictures, with positions."""
    release_if_failed: bool = True
    """True to release the tickets of a failed load. The tickets of an abandoned load are always released."""
    shared: bool = False
    """True if other requests may use the same tickets. Then the scheduler, not the load, releases the tickets."""


@hides_secrets
class Save(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: open a lease with the name `serve_id` for the blocks of a prompt.

    If `computed_tokens` is None, this step completes the prompt, and no reader knows `serve_id` until `Step.send`, from
    which `ttl_s` is counted. Otherwise the prompt is still being computed, and readers know `serve_id` and may read at
    once.
    """

    request_id: str
    serve_id: str
    block_tables: BlockTables
    num_tokens: int
    ttl_s: float
    computed_tokens: int | None = None
    """For a prompt that readers may read while it is computed: its total of computed tokens after this step;
    `block_tables` has the blocks so far. None for a prompt that this step completes."""
    prompt: tuple[int, ...] | None = None
    """The prompt's token ids, with which readers with a pending ticket compare their own prompts. None if
    `computed_tokens` is None, or if the engine does not know the ids."""
    marks: tuple[Mark, ...] = ()
    """Other input of `prompt`, for example pictures, with positions."""


class Grow(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: extend the lease of a prompt that readers may read while it is computed.

    Append the blocks in `block_tables`. `num_tokens` is the total of computed tokens after this step.
    """

    request_id: str
    block_tables: BlockTables
    num_tokens: int


@hides_secrets
class Decline(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: notify readers waiting for the lease named `serve_id` that the lease will not be opened."""

    serve_id: str
    reason: str
    waiting_at: Ticket | None = None
    """The readers' pending ticket, if they wait at another engine, which is then notified. None if they wait here."""
    instead: Ticket | None = None
    """If `waiting_at` is given: pending ticket of this engine. The readers get this ticket, and wait here instead."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Work for each worker: stop renewing the leases of `tickets`, since a request will not read their blocks."""

    request_id: str
    tickets: tuple[Ticket, ...]
    last: bool = True
    """True if no other request needs the tickets. Then the producers are notified and end the leases."""


class CachedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Report to the workers: consecutive blocks of a prompt, which peers may read once this step is computed."""

    parent: bytes
    """Key of the prompt's prefix before these blocks; empty if they begin the prompt."""
    keys: tuple[bytes, ...]
    """For each block, in prompt order: the key of the prompt's prefix that ends with that block."""
    block_tables: BlockTables
    """For each group, one block id for each key in `keys`; `NO_BLOCK` where the group needs no block."""


NO_BLOCK = -1


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Work for one worker: ask peers for a prefix of a request's prompt, and report the tickets in their answers.

    `keys` are the prompt's prefix keys, one for each `key_tokens` tokens. This engine has the first `cached_tokens`
    tokens.
    """

    request_id: str
    keys: tuple[bytes, ...]
    key_tokens: int
    cached_tokens: int
    peers: tuple[str, ...]
    """Side-channel addresses to ask: one rank of each engine."""
    use_events: bool = False
    """True to ask, in addition to `peers`, the engines that have part of the prefix according to their KV events."""


@hides_secrets
class Step(msgspec.Struct, kw_only=True):
    """The connector's work in one engine step, for each worker."""

    reused: tuple[int, ...] = ()
    """Ids of blocks that held prompts' prefixes and that this step overwrites: peers must not read them any longer."""

    send: list[str] = []
    """Ids of requests for which the router gets a ticket now: `Save.ttl_s` begins to count, and the engine waits for
    the end of the lease."""
    keep: dict[str, tuple[Ticket, ...]] = {}
    """By request id, the tickets of each new request that waits for blocks. The tickets' leases are renewed until the
    request's load has ended or the tickets are released. All tickets of a request are for the same prompt."""
    await_offers: list[str] = []
    """Ids of requests in `keep` with a pending ticket that get blocks only once their prompts are offered. The workers
    report that (`Results.offered`)."""
    withdraw: list[str] = []
    """Ids of requests with leases that must end, because their blocks will be reused."""
    recall: list[str] = []
    """Ids of requests with leases that must end before the step computes, although readers may be reading. The step
    waits until no read can succeed."""
    decline: list[Decline] = []
    receive: list[Receive] = []
    abandon: list[str] = []
    """Ids of requests with loads to cancel. Once no byte can land in a request's blocks, a worker reports the request
    as received, as after any other load that has ended."""
    save_cached: list[Save] = []
    """Leases that open before the step computes, because this engine's cache has the beginning of their prompts:
    `Save.computed_tokens` were computed by earlier steps. `grow` adds what this step computes."""
    save: list[Save] = []
    grow: list[Grow] = []
    release: list[Release] = []
    cached_blocks: list[CachedBlocks] = []
    questions: list[Question] = []
