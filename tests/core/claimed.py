"""A peer's claims about its cache that can be true, to be changed by tests; and the way of a struct over the wire."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Device
from kvflow.core.protocol import codec, messages
from tests.core.plans import SHARE

BLOCK = BlockShape(tokens=4, heads=2, run=8, token_stride=16, head_stride=8)
REGIONS = messages.RegionTable(
    bases=[4096, 8192],
    strides=[64, 64],
    block=BLOCK,
    parts=("K", "V"),
    num_blocks=4,
    device=Device("cpu", 0),
)
HOLDING = msgspec.structs.replace(
    SHARE, tp_rank=1, tp_size=2, pp_size=3, layers=(7,), kv_heads=2, model_kv_heads=4, block_size=4
)

StructT = TypeVar("StructT", bound=msgspec.Struct)


def sent(value: StructT) -> StructT:
    """A struct as it arrives: within the bounds of its type, or refused."""
    try:
        found: StructT = codec._decode(codec.encode(value), msgspec.msgpack.Decoder(type(value)))
    except OverflowError as error:
        raise codec.WireError(f"out of range: {error}") from error
    return found
