"""What holds of every message of a part: it is bounded, it survives the wire, and what is wrong with it is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec
from kvflow.core.protocol.addresses import Address
from tests.core.protocol.test_messages import HOSTILE, altered, unbounded

ASKED: dict[str, Any] = {
    "reader": "reader/0.0.0#1",
    "target": Address("holder", Rank(0, 0, 0), "tcp://127.0.0.1:1"),
}


def check_message(message: msgspec.Struct, decode: Callable[[bytes], object], *, without_bounds: str = "") -> None:
    """Check a message that `decode` decodes. `without_bounds`: the field that has no bounds in Python's sense."""
    assert [*unbounded(inspect.type_info(type(message)), "", set())] == [without_bounds] * bool(without_bounds)
    assert decode(codec.encode(message)) == message
    for hostile in HOSTILE:
        for changed in altered(msgspec.to_builtins(message, builtin_types=(bytes,)), hostile):
            with contextlib.suppress(codec.WireError):
                assert isinstance(decode(msgspec.msgpack.encode(changed)), type(message))


def check_unknown_to_the_core(request: msgspec.Struct) -> None:
    """Check that a rank without the part refuses `request` by its kind."""
    kind = request.__struct_config__.tag
    with pytest.raises(codec.UnknownRequest, match=f"^nothing here answers a question of kind '{kind}'$"):
        codec.decode_request(codec.encode(request))
