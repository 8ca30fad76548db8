"""Compatibility: equal caches have one fingerprint, and other caches differ by their facts."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.layout import CacheLayout
from kvflow.core.protocol import codec
from kvflow.core.protocol.compatibility import Compatibility, compatibility_of
from tests.support.budgets import examples

FACTS = Compatibility(model="llama", dtype="bfloat16", kv_format="plain", attention="K and V", head_size="128")


facts = st.builds(
    Compatibility,
    model=st.sampled_from(["", "a", "ab"]),
    dtype=st.sampled_from(["float16", "int8"]),
    kv_format=st.sampled_from(["plain", "a"]),
    attention=st.sampled_from(["K and V", "latent"]),
    head_size=st.sampled_from(["1", "2", "1 and 2"]),
)


@examples(60, 300)
@given(ours=facts, theirs=facts)
def test_fingerprints_are_equal_exactly_for_equal_facts(ours: Compatibility, theirs: Compatibility) -> None:
    assert (ours.fingerprint() == theirs.fingerprint()) == (ours == theirs)
    assert ours.differences(theirs) == [
        f"{name}: ours {getattr(ours, name)!r}, theirs {getattr(theirs, name)!r}"
        for name in Compatibility.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
    assert len(ours.fingerprint()) == 16


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Two machines compare it, so it must not depend on hashing seeds or on object identity."""
    copy = msgspec.msgpack.decode(codec.encode(FACTS), type=Compatibility)
    assert copy.fingerprint() == FACTS.fingerprint()
    assert FACTS.fingerprint().hex() == "f0290ec5871968c7c0d2da22d019a090"


def facts_of(
    tensor: torch.Tensor, order: str = "NHD", layers: int = 2, block_size: int = 4, model: str = "m", **changes: Any
) -> Compatibility:
    caches = {f"l{index}": tensor for index in range(layers)}
    layout = CacheLayout.infer(caches, order=order, block_size=block_size, **changes)
    return compatibility_of([layout], model=model)


def test_caches_between_which_blocks_can_be_planned_are_compatible() -> None:
    """A plan makes up for other differences: place of K and V, order of axes, block sizes, heads of a rank."""
    assert {
        facts_of(torch.zeros(2, 7, 4, 3, 8)),
        facts_of(torch.zeros(9, 2, 4, 3, 8)),  # K and V elsewhere, another number of blocks
        facts_of(torch.zeros(2, 7, 4, 3, 8).transpose(2, 3), order="HND"),  # the same memory, shown as HND
        facts_of(torch.zeros(2, 7, 3, 4, 8), order="HND"),  # other memory
        facts_of(torch.zeros(7, 4, 3, 16)),  # K and V of a head together
        facts_of(torch.zeros(2, 7, 8, 3, 8), block_size=8),
        facts_of(torch.zeros(2, 7, 4, 6, 8)),  # a rank with more heads
        facts_of(torch.zeros(2, 7, 4, 3, 8), layers=3),  # a rank with more layers
    } == {facts_of(torch.zeros(2, 7, 4, 3, 8))}


def test_caches_whose_bytes_mean_something_else_are_not() -> None:
    kv_first = facts_of(torch.zeros(2, 7, 4, 3, 8))
    others = [
        facts_of(torch.zeros(2, 7, 4, 3, 16)),
        facts_of(torch.zeros(7, 4, 3, 8)),  # fused, so that a head of K has 4 elements
        facts_of(torch.zeros(7, 4, 8)),
        facts_of(torch.zeros(7, 4, 48)),
        facts_of(torch.zeros(2, 7, 4, 3, 8, dtype=torch.int32)),
        facts_of(torch.zeros(2, 7, 4, 3, 8), model="n"),
        facts_of(torch.zeros(2, 7, 4, 3, 8), kv_format="scaled"),
    ]
    assert len({kv_first.fingerprint(), *(other.fingerprint() for other in others)}) == 1 + len(others)
