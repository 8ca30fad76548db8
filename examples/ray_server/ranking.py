"""The order in which to ask replicas: first the prefix's home replica, if it has room, then by free blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK_TOKENS = 16
HOME_SHARE = 0.5
"""A prefix's home replica is asked first if it has at least this share of the freest replica's free blocks."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica, and its number of free blocks as of the last statistics, about a second ago."""

    name: str
    blocks_free: int


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as routing sees it: tokens of its answer and prompt, digest of its prefix, replicas that failed it."""

    tokens: int = 0
    prefix: str = ""
    avoid: frozenset[str] = frozenset()


def ranked(candidates: Sequence[Candidate], request: RoutedRequest) -> list[list[str]]:
    """Return the names of all candidates in groups, of which the first is asked first. Replicas to avoid come last.

    The home replica of a prefix is chosen by highest random weight: every caller chooses the same, and other replicas
    that come or go do not change the choice.
    """
    good = [candidate for candidate in candidates if candidate.name not in request.avoid]
    avoided = [candidate.name for candidate in candidates if candidate.name in request.avoid]
    enough = max(-(-request.tokens // BLOCK_TOKENS), HOME_SHARE * max((one.blocks_free for one in good), default=0))
    home = max(good, key=lambda one: _weight(one.name, request.prefix), default=None) if request.prefix else None
    first = [home] if home is not None and home.blocks_free >= enough else []
    others = sorted((one for one in good if one not in first), key=lambda one: -one.blocks_free)
    return [[one.name] for one in (*first, *others)] + ([avoided] if avoided else [])


def _weight(name: str, prefix: str) -> bytes:
    return blake2b(f"{name} {prefix}".encode(), digest_size=8, usedforsecurity=False).digest()
