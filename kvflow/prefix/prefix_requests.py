"""Requests for prefixes, offers of holders, reports of pulls, and statistics."""

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
    """Request to fill `block_ids` with as much of a prefix as one of `peers` has in its cache.

    `keys` are `prefix_keys` of the prompt, one for each `key_tokens` tokens; the best `key_tokens` is the block size of
    the cache that is filled. A peer is the address of one of its ranks ("tcp://host:port"), a `PeerAddress`, or any
    ticket of the engine. At most 64 peers are asked, side by side.

    `block_ids` are the local blocks for the tokens from `cached_tokens` on, in prompt order, exactly as many as the
    tokens of all keys take; otherwise RequestError gives both numbers. For a cache of several groups they are one list
    for each group. A group with a window also has a block for every position of the prompt, and the blocks at the end
    of the prefix are filled. A group of state has its slot.
    """

    request_id: str
    keys: PrefixKeys
    key_tokens: Size
    block_ids: GivenBlockIds
    peers: Peers
    cached_tokens: Count = 0
    """Tokens that are in the local cache already, in full blocks. They are not read from a holder."""
    deadline_s: Seconds | None = None
    """Seconds for questions and bytes together; Config.load_deadline_s if None."""
    answer_within_s: Seconds = 0.25
    """Seconds in which a holder has to answer; a later answer is not used."""
    priority: int = 0
    after: GivenEvent = None
    """Event as in a `LoadRequest`. Without one, the device must not be using the local blocks."""
    recompute_s_per_token: Seconds | None = None
    """Seconds that computing one token takes here. If given, a prefix is not pulled if computing it should be faster,
    by the measured rate of its holder; a holder that was never read from is tried. None: any prefix is pulled.
    """
    rest: Ticket | Mapping[str, Any] | None = None
    """Ticket of the whole prompt. Its engine supplies the tokens behind the prefix, which are read side by side with
    the prefix; if the prefix cannot be read, its tokens are read from that engine, too. `block_ids` are then those of
    all tokens, with windows and state as for a load of that ticket.
    """
    prompt: Sequence[int] | None = None
    """Token ids of the prompt, compared with `rest` as `LoadRequest.prompt` is."""
    every_rank: bool = False
    """True if the tickets of `Prefixes.seek` are for other ranks of this engine, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOffer:
    """Offer of one holder, under a lease: load its ticket, or give it back by `Runtime.release_blocks`.

    After a load of the ticket, pass its report to `Prefixes.learn`.
    """

    peer: str
    """Name of the engine, and the address at which it was asked."""
    ticket: Ticket
    num_tokens: int
    queued_bytes: int
    """Bytes that the holder has leased to other readers of prefixes."""
    round_trip_s: float
    """Seconds from the question to the answer."""
    pull_s: float | None = None
    """Expected seconds of pulling, by the measured rate of the holder; None if it was never read from."""
    compute_s: float | None = None
    """Seconds of computing the same tokens, by `PrefixRequest.recompute_s_per_token`; None without that."""

    @property
    def pays(self) -> bool:
        """False if computing should be faster than pulling."""
        return self.pull_s is None or self.compute_s is None or self.pull_s <= self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAnswer:
    """Outcome of asking one peer, and of reading from it."""

    peer: str
    num_tokens: int
    """Tokens that the peer has offered."""
    why: str
    """Reason why its offer was not read; "" if it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """Report of a pull: the local blocks hold the prompt's first `num_tokens` tokens."""

    request_id: str
    num_tokens: int
    """Tokens of the prompt that are in the local blocks, including `cached_tokens`; 0 if none were found or cached."""
    pulled_tokens: int
    """Tokens that were read from the holder of the prefix."""
    bytes: int
    source: str
    """Holder that the tokens were read from; "" if none were."""
    answers: tuple[PrefixAnswer, ...]
    loads: tuple[LoadReport, ...]
    """Reports of the loads that have filled the blocks: of the prefix, and of `PrefixRequest.rest`."""
    pull_s: float | None
    """Expected seconds of pulling the prefix, by the measured rate of its holder; None if the holder had no rate."""
    compute_s: float | None
    """Expected seconds of computing the prefix, by `PrefixRequest.recompute_s_per_token`; None without that."""

    @property
    def payload(self) -> builtins.bytes:
        """Payload with which the lease of `PrefixRequest.rest` ended."""
        return self.loads[-1].payload if self.loads else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStatistics(PartStatistics):
    """Counts of pulls by outcome, and of the tokens read by them."""

    pulls: int
    hits: int
    """Pulls that have read tokens."""
    tokens: int
    bytes: int
    failed_sources: int
    """Holders with an offer that could not be read, or was not fresh."""
    declined: int
    """Offers that were not taken because computing was expected to be faster."""
    sharing: SharingStatistics | None
    """Statistics of the shared prefix cache, which begin at 0 with each `Prefixes.share`; None if none is shared."""


def checked_prefix_request(given: object, verb: str, limits: Limits) -> PrefixRequest:
    """Check a request, and return it with its numbers and texts as Python's own. RequestError names the problem."""
    plain = checks.settled_request(given, PrefixRequest, verb, limits.block_ids_max)
    if plain.cached_tokens > (tokens := len(plain.keys) * plain.key_tokens):
        cached = f"cached_tokens is {plain.cached_tokens}, beyond its keys"
        raise RequestError(f"request {plain.request_id!r}: {cached}, which are for {counted(tokens, 'token')}")
    return plain


def check_blocks(request: PrefixRequest, groups: Sequence[GroupFacts], tables: Sequence[BlockIds]) -> None:
    """Raise RequestError unless `tables` have exactly the blocks for the tokens from `cached_tokens` on.

    Without `rest` these are the tokens of all keys. With `rest` they are the tokens that it offers: then its load
    checks the blocks of windows and state, and, if it is a rendezvous, all blocks.
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
    """Return the bytes of one token of a prompt in this rank's cache, over the layers that keep all tokens."""
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
