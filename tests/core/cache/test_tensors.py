"""Tensors that can hold a KV cache: dense, with bytes in memory of their own, by layer name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import map_regions
from kvflow.core.cache.tensors import checked_caches
from kvflow.errors import LayoutError
from tests.support.tests_support import each

SHAPE = (2, 6, 4, 2, 8)


def quiet(make: Callable[[], Any]) -> Callable[[], Any]:
    """Made without torch's warning that it is new."""

    def made() -> Any:
        with warnings.catch_warnings(action="ignore"):
            return make()

    return made


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(SHAPE)


class Broken:
    """Something like a tensor that raises when it is asked for its shape."""

    @property
    def shape(self) -> Any:
        raise ZeroDivisionError

    def data_ptr(self) -> int:
        return 1


UNFIT: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.zeros(SHAPE).to_sparse(),
    "compressed": quiet(lambda: torch.zeros(3, 3).to_sparse_csr()),
    "opaque": lambda: torch.zeros(2, 3, 4, 5).to_mkldnn(),
    "quantized": quiet(lambda: torch.quantize_per_tensor(torch.zeros(SHAPE), 0.1, 0, torch.qint8)),
    "nested": quiet(lambda: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged),
    "complex": lambda: torch.zeros(SHAPE, dtype=torch.complex64),
    "a lazy conjugate": lambda: torch.zeros(SHAPE, dtype=torch.complex64).conj(),
    "a lazy negative": lambda: torch.zeros(SHAPE, dtype=torch.complex64).conj().imag,
    "part of a graph": lambda: torch.zeros(SHAPE, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(SHAPE)),
    "computed from one": lambda: torch.zeros(SHAPE, requires_grad=True) * 2,
    "fake": fake,
    "empty": lambda: torch.zeros(0),
    "without axes": lambda: torch.tensor(1.0),
    "an array": lambda: np.zeros(SHAPE, dtype=np.float32),
    "broken": Broken,
    "a set of tensors": lambda: {torch.zeros(SHAPE)},
    "a pair, one of them sparse": lambda: (torch.zeros(SHAPE[1:]), torch.zeros(SHAPE[1:]).to_sparse()),
    "a module": lambda: torch.nn.Identity(),
    "None": lambda: None,
}


@each("what", UNFIT)
def test_a_tensor_that_cannot_hold_a_cache_is_refused_with_its_layer(what: str) -> None:
    layer = UNFIT[what]()
    for caches in ({"good": torch.zeros(SHAPE), "odd.layer": layer}, {"odd.layer": layer}):
        with pytest.raises(LayoutError, match=r"'odd\.layer'"):
            CacheLayout.infer(caches, order="NHD", block_size=4)
    layout = CacheLayout.infer({"odd.layer": torch.zeros(SHAPE)}, order="NHD", block_size=4)
    with pytest.raises(LayoutError, match=r"'odd\.layer'"):
        map_regions(layout, {"odd.layer": layer})


@each("caches", [None, 5, "caches", [], [("l0", torch.zeros(SHAPE))], {}, {0: torch.zeros(SHAPE)}, torch.zeros(SHAPE)])
def test_what_is_no_dict_of_layers_is_refused(caches: Any) -> None:
    with pytest.raises(LayoutError, match=r"^kv_caches: "):
        checked_caches(caches)


def test_the_dict_is_our_own() -> None:
    """Layers that its owner adds later are none of the cache."""
    given = {"l0": torch.zeros(SHAPE)}
    checked = checked_caches(MappingProxyType(given))
    given["l1"] = torch.zeros(SHAPE)
    assert list(checked) == ["l0"]
