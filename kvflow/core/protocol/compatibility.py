"""Compatibility: the facts that two engines must agree on for any byte of a cache to mean the same on both.

Its fingerprint travels in the header of every message. Facts that may differ, and that a plan allows for, are in a
rank's `topology.CacheShare`; a refused peer is told both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from kvflow.core.bounds import Fact
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.state import StatePart
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER


class Compatibility(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that both sides must agree on. Error messages show the field names."""

    model: Fact
    dtype: Fact
    kv_format: Fact
    attention: Fact
    head_size: Fact

    def fingerprint(self) -> bytes:
        """A 16-byte digest, equal exactly for equal facts."""
        return hashlib.sha256(msgspec.msgpack.encode(self), usedforsecurity=False).digest()[:16]

    def differences(self, theirs: Compatibility) -> list[str]:
        """Differences, as "field: ours X, theirs Y" for each fact."""
        pairs = ((name, getattr(self, name), getattr(theirs, name)) for name in self.__struct_fields__)
        return [f"{name}: ours {ours!r}, theirs {other!r}" for name, ours, other in pairs if ours != other]


def compatibility_of(layouts: Sequence[CacheLayout | StatePart], *, model: str) -> Compatibility:
    """Facts of one rank's cache; where layers differ, all values.

    State has its own in the cache shares. So have layers of a draft model, which the other side may lack.
    """
    attention = [layout for layout in layouts if isinstance(layout, CacheLayout)]
    own = [layout for layout in attention if min(layout.layer_indices) < FIRST_DRAFT_LAYER] or attention

    def facts(fact: Callable[[CacheLayout], object]) -> str:
        return " and ".join(sorted({str(fact(layout)) for layout in own}))

    return Compatibility(
        model=model,
        dtype=facts(lambda layout: layout.dtype),
        kv_format=facts(lambda layout: layout.kv_format),
        attention=facts(lambda layout: "latent" if layout.latent else "K and V"),
        head_size=facts(lambda layout: layout.kv_head_size),
    )
