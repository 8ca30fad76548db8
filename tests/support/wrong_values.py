"""Wrong values that a caller may pass by mistake, by the annotation of the parameter.

`REFUSED` lists, for each annotation, values that must be refused. `alike` returns a valid value in other valid forms,
for instance as a numpy number.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch


def _generator() -> Iterator[int]:
    yield 0


def _odd() -> list[Any]:
    """Return values that are wrong for every annotation."""
    return [object(), int, _generator, 1j, {0}, Ellipsis, NotImplemented]


def _no_number() -> list[Any]:
    texts: list[Any] = ["", "1", "one", b"1", bytearray(b"1")]
    return [*_odd(), *texts, [], [1], (1,), {}, {"a": 1}, np.array([1]), torch.tensor(1), Decimal(1), True, np.True_]


def _no_whole_number() -> list[Any]:
    huge: list[Any] = [1 << 63, 1 << 70, 10**400, 10**5000, -(1 << 63) - 1, np.uint64(1 << 63)]
    return [*_no_number(), *huge, 1.0, 1.5, np.float64(1), Fraction(1), float("nan"), float("inf")]


def _no_seconds() -> list[Any]:
    numbers: list[Any] = [0, 0.0, -1, -1e-300, float("nan"), float("inf"), float("-inf"), 1e300, 1 << 70, 10**400]
    return [*_no_number(), *numbers, np.float32("nan"), Fraction(-1, 2)]


def _no_text() -> list[Any]:
    return [*_odd(), 0, 1, 1.5, True, b"text", bytearray(b"text"), [], ["text"], {}, "\ud800", "a\udfffb", Path("text")]


def _no_list() -> list[Any]:
    """Return values that are neither a list nor an array of integers, among them lists with a wrong entry."""
    no_lists: list[Any] = [0, 1.5, True, "", "0", b"", b"0", bytearray(b"\0"), {}, {0: 0}, _generator()]
    entries: list[Any] = [1.0, True, np.True_, None, "0", b"0", [0], (0,), {}, object(), 1 << 70, 1j]
    arrays: list[Any] = [np.array([0.5]), np.array([[0]]), np.array(0), np.array([True]), np.array(["0"])]
    tensors: list[Any] = [torch.tensor([0.5]), torch.tensor([[0]]), torch.tensor(0), torch.tensor([True])]
    return [*_odd(), *no_lists, *([entry] for entry in entries), *arrays, *tensors, torch.zeros(1, device="meta")]


def _no_texts() -> list[Any]:
    return [*_odd(), 0, "", "a", [], (), [0], [None], ["\ud800"], [["a"]], _generator()]


_COUNTS = ("Count", "Size", "RankCount", "TokenCount", "SealCount", "ByDevice")
_WORDS = ("EngineId", "ListenAddress", "SideChannel", "BackendNames", "Role", "TransportName", "Mode", "WireName")
_TEXTS = (
    "str",
    "ModelName",
    "PlainName",
    "Name",
    "Host",
    "RequestId",
    "Traceparent",
    "PromptDigest",
    "TicketLeaseId",
    "Weights",
    "OfferDigest",
)
REFUSED: Mapping[str, Callable[[], list[Any]]] = {
    "int": lambda: [None, *_no_whole_number()],
    "int | None": _no_whole_number,
    "float": lambda: [None, *_no_seconds()],
    "float | None": _no_seconds,
    **dict.fromkeys(("Seconds", "SealHold"), lambda: [None, *_no_seconds()]),
    "Seconds | None": _no_seconds,
    "Deadline | None": lambda: [*_no_number(), float("nan"), float("inf"), 1e300, 1 << 70, 10**400, np.float32("nan")],
    "Share": lambda: [None, *_no_number(), -0.1, 1.1, 2, float("nan"), float("inf"), 10**400],
    "StoreKey": lambda: [None, *_odd(), 0, 1.5, "", b"", "x" * 257, b"x" * 257, bytearray(b"k"), "\ud800", [], {}],
    "bool | None": lambda: [*_odd(), 0, 1, 1.0, "", "True", [], np.True_],
    "bool": lambda: [*_odd(), None, 0, 1, 1.0, "", "True", [], np.True_],
    "Int64": lambda: [None, *_no_whole_number()],
    **dict.fromkeys(_COUNTS, lambda: [None, *_no_whole_number(), -1]),
    **dict.fromkeys(("Count | None", "Size | None"), lambda: [*_no_whole_number(), -1]),
    **dict.fromkeys(_TEXTS, lambda: [None, *_no_text()]),
    "GivenTraceparent": lambda: [value for value in _no_text() if not isinstance(value, str)],
    **dict.fromkeys(_WORDS, lambda: [None, *_no_text(), "a b"]),
    **dict.fromkeys(("str | None", "AdvertisedHost | None"), _no_text),
    "Path | None": lambda: [
        *("a\0b", Path("a\0b"), *(value for value in _no_text() if not isinstance(value, Path))),
    ],
    "GivenLimits": lambda: [*_odd(), None, 0, "", [], {}, {"peers_max": 1}, [("peers_max", 1)]],
    "Texts": lambda: [
        *(None, *_odd(), 0, "", "a=b", [], [("a", "b")], {1: "b"}, {"a": 1}, {"a": None}, {"a": "\ud800"}),
    ],
    "PrefixKeys": lambda: [None, *_odd(), 0, "", [], [0], [None], [b"short"], ["x" * 32], [bytearray(32)]],
    "GivenPeers": lambda: [None, *_odd(), 0, "tcp://127.0.0.1:1", b"", {"remote_host": "h"}],
    "Ticket | Mapping[str, Any] | None": lambda: [*_odd(), 0, "", "a", [], {}, {"remote_engine_id": "e"}],
    "Sequence[int]": lambda: [None, *_no_list()],
    "Sequence[int] | None": _no_list,
    "WholeNumbers": lambda: [None, *_no_list()],
    # An empty dict is valid here: it names no group.
    "GivenBlockIds": lambda: [None, *(value for value in _no_list() if type(value) is not dict or value)],
    "BlockIds": lambda: [None, *_no_list()],
    "BlockIds | None": _no_list,
    "BlockTables": lambda: [None, *_odd(), 0, "", "0", {}, [0], [None], ["0"], [[1.5]], [[None]], [{0}]],
    "Groups": lambda: [None, *_odd(), 0, "a", [0], (None,), ({},), _generator()],
    "Kinds": lambda: [None, *_odd(), 0, "a", [0], [(1, 1)], [(0, 1, 1)], [(1, 1, "1")]],
    "LayerNames": lambda: [None, *_no_texts()],
    "Ranks": lambda: [None, *_no_texts(), (None,), ({},)],
    "KVCaches": lambda: [None, *_odd(), 0, "", [], {}, {"l": 0}, {1: torch.zeros(1)}, _generator()],
    "CacheLayout | StateLayout | Sequence[CacheLayout]": lambda: [
        *(None, *_odd(), 0, "", [], (), [None], {}, _generator()),
    ],
    "SchedulerGroups": lambda: [None, *_odd(), 0, "a", [0], (None,), ({},), {}, _generator()],
    "GivenEvent": lambda: [*_odd(), 0, True, "", [], {}, _generator()],
    "StateTensors": lambda: [None, *_odd(), 0, "", [], [None], {}, _generator()],
    "Shapes": lambda: [None, *_odd(), 0, "", [], [None], [0], {}, _generator(), [[1.5]]],
    "Segments": lambda: [None, *_odd(), 0, "", [None], [{}], {}, _generator()],
    "GroupKind | str | None": lambda: [*_odd(), 0, "", "full", "windowed", [], {}],
    "Style": lambda: [None, *_odd(), 0, "", "kv_last", [], ["mla"], {}],
    "GivenAgain": lambda: [value for value in _odd() if not callable(value)] + [0, True, "again", [], {}],
    "GivenTicket | Sequence[GivenTicket]": lambda: [
        *(None, *_odd(), 0, 1.5, True, "", "ticket", b"{}", [], [1], {}, {1: 2}, {"\ud800": 1}, _generator()),
        *([None], [{}], [object()], [[]]),
    ],
    "Ticket | Mapping[str, Any]": lambda: [None, *_odd(), 0, "ticket", [], [1], {}, {1: 2}],
}
"""For each annotation of a field of a public class, a function that returns values to be refused."""


def alike(value: Any) -> list[Any]:
    """Return a valid value, followed by other forms of it that are valid, too."""
    match value:
        case bool() | None:
            return [value]
        case int():
            return [value, np.int64(value), np.int32(value), enum.IntEnum("Made", {"A": value}).A]
        case float():
            return [value, np.float64(value), Fraction(value), *([int(value)] if value == int(value) else [])]
        case str():
            return [value, np.str_(value), enum.StrEnum("Made", {"A": value}).A]
        case list() if value and all(type(entry) is int for entry in value):
            arrays = [np.array(value), np.array(value, np.uint64), np.array(value, np.int32), torch.tensor(value)]
            return [value, tuple(value), array("q", value), [np.int64(entry) for entry in value], *arrays]
        case dict():
            return [value, MappingProxyType(value)]
        case _:
            return [value]
