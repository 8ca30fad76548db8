"""Requests, offers, reports and statistics of `Prefixes`. A holder is a peer that has the prefix in its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, cast

from kvflow import checks
from kvflow.checks import Count, Deadline, Seconds, Size, counted
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds, GivenBlockIds
from kvflow.core.policy.events import GivenEvent
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import DeadlineExceeded, RequestError
from kvflow.limits import Limits
from kvflow.prefix.keys import KEY_BYTES
from kvflow.prefix.prefix_cache import SharingStatistics
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.statistics import PartStatistics

PEERS_MAX = 64
_KEYS_MAX = 1 << 20

GivenPeer: TypeAlias = "PeerAddress | Ticket | Mapping[str, Any] | str"


@checks.hides_secrets
@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """Request to fill `block_ids` with the longest beginning of a prefix that one of `peers` has in its prefix cache.

    `keys` come from `prefix_keys(prompt, key_tokens)`; the best `key_tokens` is the block size of the local cache. Each
    of `peers` is the address of one of the peer's ranks ("tcp://host:port"), a `PeerAddress`, or any ticket of the
    peer. At most 64 peers are allowed.

    `block_ids` are the local blocks, in prompt order, for exactly the tokens from `cached_tokens` to the last token
    that the keys cover. For a cache of several groups, give one list for each group. A group with a sliding window
    needs blocks for all of these tokens, too, although only the blocks at the end of the prefix are filled. A group of
    recurrent state needs its slot.
    """

    request_id: str
    keys: PrefixKeys
    key_tokens: Size
    block_ids: GivenBlockIds
    peers: GivenPeers
    cached_tokens: Count = 0
    """Number of leading tokens that the local cache already holds in full blocks, and that are not read."""
    deadline_s: Deadline | None = None
    """Seconds that the whole pull may take, from asking the peers to the last byte; None: Config.load_deadline_s."""
    answer_within_s: Seconds = 0.25
    """Seconds to wait for the peers' answers. Later offers are used only if no earlier offer could be read."""
    priority: int = 0
    after: GivenEvent = None
    """Device event after which the device no longer touches the local blocks, as in `LoadRequest.after`. None: the
    device is not using the blocks.
    """
    recompute_s_per_token: Seconds | None = None
    """Seconds that the local engine takes to compute one token. A prefix is not read from a peer if earlier loads from
    that peer show that computing should be faster. Without such loads, or if None, the prefix is read.
    """
    every_rank: bool = False
    """True if other ranks of the local engine will also load the tickets that `Prefixes.seek` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOffer:
    """A peer's offer of a prefix, with a lease. Load the ticket, or release the lease by `Runtime.release_blocks`.

    After a load of the ticket, pass the load's report to `Prefixes.learn`.
    """

    peer: str
    """The peer's engine id, and the address of one of its ranks."""
    ticket: Ticket
    num_tokens: int
    queued_bytes: int
    """Number of bytes that the peer has leased to other readers of prefixes."""
    round_trip_s: float
    """Seconds from the question to the last answer of the peer's ranks."""
    pull_s: float | None = None
    """Expected seconds to read the tokens that are not cached locally, judged by earlier loads from the peer, plus
    `round_trip_s`; None without such loads.
    """
    compute_s: float | None = None
    """Expected seconds to compute the same tokens locally; None if `PrefixRequest.recompute_s_per_token` is None."""

    @property
    def pays(self) -> bool:
        """False if computing the tokens locally should be faster than reading them from the peer."""
        return self.pull_s is None or self.compute_s is None or self.pull_s <= self.compute_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAnswer:
    """A peer's answer to the question for a prefix."""

    peer: str
    num_tokens: int
    """Number of tokens that the peer has offered; 0 if none."""
    why: str
    """Reason why the prefix was not read from the peer; "" if it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """Result of a pull: the local blocks hold the prompt's first `num_tokens` tokens."""

    request_id: str
    num_tokens: int
    """Number of the prompt's tokens in the local blocks, including `PrefixRequest.cached_tokens`."""
    pulled_tokens: int
    """Number of tokens of the prefix that were read from a peer, without `cached_tokens`."""
    bytes: int
    source: str
    """Name and address of the peer that the prefix was read from; "" if no prefix was read."""
    answers: tuple[PrefixAnswer, ...]
    load: LoadReport | None
    """Report of the load of the prefix; None if no prefix was read."""
    pull_s: float | None
    """`PrefixOffer.pull_s` of the used offer or, if none was used, of the last one considered; None if unknown."""
    compute_s: float | None
    """`PrefixOffer.compute_s` of the used offer or, if none was used, of the last one considered; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStatistics(PartStatistics):
    """Counts of pulls by outcome, and of the tokens and bytes of prefixes read from peers."""

    pulls: int
    hits: int
    """Number of pulls that read a prefix from a peer."""
    tokens: int
    bytes: int
    failed_sources: int
    """Number of failed attempts to read an offered prefix, including reads that outlasted the lease."""
    declined: int
    """Number of offers not loaded because computing the tokens was expected to be faster."""
    handed_on_tokens: int
    """Number of tokens that successors have pulled from this engine, as `Prefixes.hand_on` has reported."""
    taken_over_tokens: int
    """Number of tokens that this engine has pulled from engines that it has succeeded (`Prefixes.accept`)."""
    sharing: SharingStatistics | None
    """Statistics of the shared prefix cache since `Prefixes.share`; None if no cache is shared."""


def checked_prefix_request(given: object, verb: str, limits: Limits) -> PrefixRequest:
    """Return `given` as a valid PrefixRequest with plain Python numbers and strings, or raise RequestError.

    DeadlineExceeded if no time is left. `verb`: name of the called method, for the error message.
    """
    plain = checks.normalize_request(given, PrefixRequest, verb, limits.block_ids_max)
    if plain.cached_tokens > (tokens := len(plain.keys) * plain.key_tokens):
        cached = f"cached_tokens is {plain.cached_tokens}, beyond its keys"
        raise RequestError(f"request {plain.request_id!r}: {cached}, which are for {counted(tokens, 'token')}")
    if plain.deadline_s is not None and plain.deadline_s <= 0:
        late = f"request {plain.request_id!r}: {verb}: its deadline_s was {plain.deadline_s:g} when it was requested"
        raise DeadlineExceeded(late, request_id=plain.request_id, peer="", phase="queued")
    return plain


def check_blocks(request: PrefixRequest, groups: Sequence[GroupFacts], tables: Sequence[BlockIds]) -> None:
    """Raise RequestError unless `tables` (block ids by group) have exactly as many blocks as `request` needs.

    The request needs blocks from token `cached_tokens` to the last token that the keys cover.
    """
    cached, tokens = request.cached_tokens, len(request.keys) * request.key_tokens
    for group, ids in zip(groups, tables, strict=True):
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
            raise RequestError(f"{what}, but its keys are for {wanted}")


def token_size_bytes(local: LocalRank) -> int:
    """Return how many bytes one token takes in this rank's KV cache, in layers that keep all tokens."""
    size = 0
    for share, regions in zip(local.cache_shares, local.regions, strict=True):
        if local.groups[share.group].whole:
            size += regions.block.size_bytes * len(regions.distinct) // share.block_size
    return size


def checked_keys(given: object, what: str) -> tuple[bytes, ...]:
    """Return `given` as a tuple of keys. RequestError if there are none, too many, or something else is in it."""
    checks.count(given, what, most=_KEYS_MAX)
    found: tuple[Any, ...] | None = checks.try_call(lambda: tuple(cast(Any, given)))
    if not found or not all(type(key) is bytes and len(key) == KEY_BYTES for key in found):
        raise RequestError(f"{what}: expected keys of {KEY_BYTES} bytes each, got {checks.short_repr(given)}")
    return found


def checked_peers(given: object, what: str) -> tuple[Any, ...]:
    if not isinstance(given, tuple | list) or checks.count(given, what) > PEERS_MAX:
        raise RequestError(f"{what}: expected at most {PEERS_MAX} addresses or tickets, got {checks.short_repr(given)}")
    return tuple(given)


PrefixKeys: TypeAlias = Annotated[Sequence[bytes], checked_keys]
GivenPeers: TypeAlias = Annotated[Sequence[GivenPeer], checked_peers]
