"""The order in which replicas should be asked: the prefix's own, if it has room enough, then the freest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK_TOKENS = 16
HOME_SHARE = 0.5
"""The prefix's own replica is asked first while it has at least this share of the freest one's blocks."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica, and the blocks that it had free when it was last asked, a second ago or so."""

    name: str
    blocks_free: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs, what its prompt begins with, and who has failed it."""

    tokens: int = 0
    prefix: str = ""
    avoid: frozenset[str] = frozenset()


def ranked(candidates: Sequence[Candidate], wanted: Wanted) -> list[list[str]]:
    """Names in ranks: the first rank is asked first. Every candidate is in one, so that nobody waits for ever.

    The prefix's own replica is the same for everybody who asks, whoever else comes or goes (highest random weight).
    """
    good = [candidate for candidate in candidates if candidate.name not in wanted.avoid]
    avoided = [candidate.name for candidate in candidates if candidate.name in wanted.avoid]
    enough = max(-(-wanted.tokens // BLOCK_TOKENS), HOME_SHARE * max((one.blocks_free for one in good), default=0))
    home = max(good, key=lambda one: _weight(one.name, wanted.prefix), default=None) if wanted.prefix else None
    first = [home] if home is not None and home.blocks_free >= enough else []
    others = sorted((one for one in good if one not in first), key=lambda one: -one.blocks_free)
    return [[one.name] for one in (*first, *others)] + ([avoided] if avoided else [])


def _weight(name: str, prefix: str) -> bytes:
    return blake2b(f"{name} {prefix}".encode(), digest_size=8, usedforsecurity=False).digest()
