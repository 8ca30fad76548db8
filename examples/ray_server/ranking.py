"""The order in which to ask replicas: first the prefix's home replica, if it has room, then by free blocks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b

BLOCK_TOKENS = 16
HOME_SHARE = 0.5
"""A prefix's home replica is asked first if it has at least this share of the freest replica's free blocks."""


def ranked(
    blocks_free: Mapping[str, int], *, tokens: int = 0, prefix: str = "", avoid: Collection[str] = ()
) -> list[list[str]]:
    """Return the names of all replicas in groups, of which the first is asked first. Replicas to avoid come last.

    The home replica of a prefix is chosen by highest random weight: every caller chooses the same, and other replicas
    that come or go do not change the choice.

    Args:
        blocks_free: Number of free blocks of each replica, as of the last statistics, about a second ago.
        tokens: Number of tokens of the prompt and its answer.
        prefix: Digest of the prompt's first tokens; "" for no prefix.
        avoid: Replicas that have failed the request.
    """
    good = [name for name in blocks_free if name not in avoid]
    avoided = [name for name in blocks_free if name in avoid]
    enough = max(-(-tokens // BLOCK_TOKENS), HOME_SHARE * max((blocks_free[name] for name in good), default=0))
    home = max(good, key=lambda name: _weight(name, prefix), default=None) if prefix else None
    first = [home] if home is not None and blocks_free[home] >= enough else []
    others = sorted((name for name in good if name not in first), key=lambda name: -blocks_free[name])
    return [[name] for name in (*first, *others)] + ([avoided] if avoided else [])


def _weight(name: str, prefix: str) -> bytes:
    return blake2b(f"{name} {prefix}".encode(), digest_size=8, usedforsecurity=False).digest()
