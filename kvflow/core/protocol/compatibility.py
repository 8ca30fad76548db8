"""`Compatibility`: the properties in which two engines must agree, so that a byte of the cache means the same on both.

The header of every message has a digest of these properties. Properties in which two engines may differ, because a plan
of reads can handle that, are in a rank's `topology.CacheShare`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from kvflow.core.bounds import Fact
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.state import SegmentLayout
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER


class Compatibility(msgspec.Struct, frozen=True, kw_only=True):
    """Properties in which both sides of a load must agree. Error messages contain the names of the fields."""

    model: Fact
    dtype: Fact
    kv_format: Fact
    attention: Fact
    head_size: Fact

    def fingerprint(self) -> bytes:
        """Return a 16-byte digest of all fields."""
        return hashlib.sha256(msgspec.msgpack.encode(self), usedforsecurity=False).digest()[:16]

    def differences(self, theirs: Compatibility) -> list[str]:
        """Return the fields in which `theirs`, a peer's `Compatibility`, has another value, each as "field: ours X,
        theirs Y".
        """
        pairs = ((name, getattr(self, name), getattr(theirs, name)) for name in self.__struct_fields__)
        return [f"{name}: ours {ours!r}, theirs {other!r}" for name, ours, other in pairs if ours != other]


def compatibility_of(layouts: Sequence[CacheLayout | SegmentLayout], *, model: str) -> Compatibility:
    """Return the `Compatibility` of one rank's cache, from the layouts of its layers.

    If layers differ in a property, that field has all the values, joined by " and ". State per request and layers of a
    draft model, which a peer may lack, are left out: for these, ranks compare their cache shares.
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
