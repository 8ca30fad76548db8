"""Pulls of prefixes as their caller sees them: the request, what holders offer, the report, and the counts of all."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, cast

from kvflow import checks
from kvflow.checks import Count, Seconds, Size, counted
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds, GivenBlockIds
from kvflow.core.policy.events import GivenEvent
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError
from kvflow.limits import Limits
from kvflow.prefix.keys import KEY_BYTES
from kvflow.prefix.prefix_cache import SharingStatistics
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.statistics import PartStatistics

PEERS_MAX = 64
_KEYS_MAX = 1 << 20

GivenPeer: TypeAlias = "PeerAddress | Ticket | Mapping[str, Any] | str"


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """Fill `block_ids` with as much of a prefix as one of `peers` has in its cache.

    `keys` are `prefix_keys` of the prompt, one for each `key_tokens` tokens: best the block size of the cache
    that is filled. Each peer is the address of one of its ranks ("tcp://host:port"), a `PeerAddress`, or any ticket of
    the engine; at most 64 are asked, side by side.

    `block_ids` are the local blocks for the tokens from `cached_tokens` on, in prompt order, as many as the keys are
    for: RequestError with both numbers if there are fewer or more. For a cache of several groups they are a list for
    each: one with a window has a block for every place of the prompt, too, and those at the end of what is found are
    filled; one of state has its slot.
    """

    request_id: str
    keys: PrefixKeys
    key_tokens: Size
    block_ids: GivenBlockIds
    peers: Peers
    cached_tokens: Count = 0
    """Tokens that are in the caller's cache already: full blocks of it. What holders have of them is not read."""
    deadline_s: Seconds | None = None
    """Seconds for questions and bytes together; Config.load_deadline_s if None."""
    answer_within_s: Seconds = 0.25
    """Time in which a holder has to answer; who answers later is left out."""
    priority: int = 0
    after: GivenEvent = None
    """Event as in a `LoadRequest`: without it the local blocks have to be at rest."""
    recompute_s_per_token: Seconds | None = None
    """Seconds that computing a token takes here. With it no prefix is pulled that is computed sooner, by the measured
    rate of its holder; None pulls any."""
    rest: Ticket | Mapping[str, Any] | None = None
    """A ticket of the whole prompt, whose engine gives what the prefix has not: both are read side by side, and what
    fails of the prefix is read from there as well. `block_ids` are then those of all tokens, windows and state as for a
    load of that ticket."""
    prompt: Sequence[int] | None = None
    """Token ids of the prompt, to be compared with `rest` as `LoadRequest.prompt` is."""
    every_rank: bool = False
    """True if the tickets of `Prefixes.seek` are for other ranks of this engine, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOffer:
    """The offer of one holder, under a lease: load its ticket, or give it back by `Runtime.release_blocks`.

    Who loads the ticket tells `Prefixes.learn` how long that took.
    """

    peer: str
    """Engine that offers it, and where it was asked."""
    ticket: Ticket
    num_tokens: int
    queued_bytes: int
    """Bytes that the holder has leased to other readers of prefixes."""
    round_trip_s: float
    """Seconds that the question took."""
    pull_s: float | None = None
    """Seconds that pulling is expected to take, by the measured rate of the holder; None if it was never read from."""
    compute_s: float | None = None
    """Seconds that computing as many tokens takes, by `PrefixRequest.recompute_s_per_token`; None without that."""

    @property
    def pays(self) -> bool:
        """False if computing is expected to be faster than pulling."""
        return self.pull_s is None or self.compute_s is None or self.pull_s <= self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAnswer:
    """The outcome of asking, and reading from, one peer."""

    peer: str
    num_tokens: int
    """Tokens that it has offered."""
    why: str
    """The reason why they were not taken; "" if they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """Result of a pull: the local blocks hold the prompt's first `num_tokens` tokens."""

    request_id: str
    num_tokens: int
    """Tokens of the prompt that are there, `cached_tokens` included; 0 if nothing was found and nothing cached."""
    pulled_tokens: int
    """Tokens that came from the holder of the prefix."""
    bytes: int
    source: str
    """Holder that they came from; "" if none."""
    answers: tuple[PrefixAnswer, ...]
    loads: tuple[LoadReport, ...]
    """Reports of the loads that have filled the blocks: of the prefix, and of `PrefixRequest.rest`."""
    pull_s: float | None
    """Seconds that pulling the prefix was expected to take, by the measured rate of that holder; None if none was."""
    compute_s: float | None
    """Seconds that computing the prefix was said to take."""

    @property
    def payload(self) -> builtins.bytes:
        """Payload that came with the end of the lease of `PrefixRequest.rest`."""
        return self.loads[-1].payload if self.loads else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStatistics(PartStatistics):
    """Pulls of prefixes so far, by their outcome, and the tokens that they have saved."""

    pulls: int
    hits: int
    """Pulls that have brought tokens."""
    tokens: int
    bytes: int
    failed_sources: int
    """Holders that have offered, and whose bytes did not come or were not fresh."""
    declined: int
    """Offers that were not taken, since computing was expected to be faster."""
    sharing: SharingStatistics | None
    """Counts of what is shared, anew with each `Prefixes.share`; None if nothing is."""


def checked_prefix_request(given: object, verb: str, limits: Limits) -> PrefixRequest:
    """Check a request, and give it with its numbers and texts as Python's own. RequestError names the problem."""
    plain = checks.settled_request(given, PrefixRequest, verb, limits.block_ids_max)
    if plain.cached_tokens > (tokens := len(plain.keys) * plain.key_tokens):
        cached = f"cached_tokens is {plain.cached_tokens}, beyond its keys"
        raise RequestError(f"request {plain.request_id!r}: {cached}, which are for {counted(tokens, 'token')}")
    return plain


def check_blocks(request: PrefixRequest, groups: Sequence[GroupFacts], tables: Sequence[BlockIds]) -> None:
    """Raise RequestError unless the local blocks are for just the tokens from `cached_tokens` on.

    Without `rest` these are the tokens of all keys. With it they are those that it offers; the blocks of windows and
    state are then its load's to check, as are all blocks of a rendezvous.
    """
    rest, cached = request.rest, request.cached_tokens
    tokens, whose = len(request.keys) * request.key_tokens, "its keys are for"
    if isinstance(rest, Ticket):
        tokens, whose = rest.offered_tokens, "its rest offers"
        if rest.awaited or not tokens:
            return
    for group, ids in zip(groups, tables, strict=True):
        if rest is not None and not group.whole:
            continue
        size, count = group.block_size, len(ids)
        needed = -(-tokens // size) - cached // size if tokens > cached else 0
        if group.kind is GroupKind.STATE:
            needed = 1 if needed else min(count, 1)
        if count != needed:
            of = "" if len(groups) == 1 else f" of group {group.name!r}"
            what = (
                f"request {request.request_id!r}: block_ids: {counted(count, 'block')}{of} of {counted(size, 'token')}"
            )
            wanted = f"{counted(tokens, 'token')}, {cached} of them cached, which take {needed}"
            raise RequestError(f"{what}, but {whose} {wanted}")


def token_size_bytes(local: LocalRank) -> int:
    """Return the bytes of one token of a prompt in this rank's cache, in layers that keep all of it."""
    size = 0
    for share, regions in zip(local.cache_shares, local.regions, strict=True):
        if local.groups[share.group].whole:
            size += regions.block.size_bytes * len(regions.distinct) // share.block_size
    return size


def _keys(given: object, what: str) -> tuple[bytes, ...]:
    checks.count(given, what, most=_KEYS_MAX)
    found: tuple[Any, ...] | None = checks.answer(lambda: tuple(cast(Any, given)))
    if not found or not all(type(key) is bytes and len(key) == KEY_BYTES for key in found):
        raise RequestError(f"{what}: expected keys of {KEY_BYTES} bytes each, got {checks.shown(given)}")
    return found


def _peers(given: object, what: str) -> tuple[Any, ...]:
    if not isinstance(given, tuple | list) or checks.count(given, what) > PEERS_MAX:
        raise RequestError(f"{what}: expected at most {PEERS_MAX} addresses or tickets, got {checks.shown(given)}")
    return tuple(given)


PrefixKeys: TypeAlias = Annotated[Sequence[bytes], _keys]
Peers: TypeAlias = Annotated[Sequence[GivenPeer], _peers]
