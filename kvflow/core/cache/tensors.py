"""A KV cache as its engine passes it to kvflow: tensors by layer name. Checks whether tensors can hold a KV cache.

Tensors are read through `TensorLike`, so nothing here needs torch. A tensor can hold a cache if it is dense, and not
quantized, nested, complex or part of a gradient's graph, and no lazy operation, such as a pending negation, stands
between its bytes and its values.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Protocol, TypeAlias

from msgspec import Meta

from kvflow import checks
from kvflow.checks import try_call
from kvflow.errors import LayoutError

LAYERS_MAX = 1 << 15
FIRST_DRAFT_LAYER = LAYERS_MAX // 2
"""Lowest index of a layer of a draft model. One side of a load may lack layers with this or a higher index."""
NAMED_LAYERS_MAX = 1 << 10
"""Upper bound (exclusive) of the layer numbers in vLLM's layer names. If several layers have the same number m, such as
an attention and its indexer, the nth of these layers (from 0) gets the index m + n * NAMED_LAYERS_MAX."""
NAME_CHARS_MAX = 1024


class DeviceLike(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


class TensorLike(Protocol):
    """The attributes of torch.Tensor that kvflow reads."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> DeviceLike: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


LayerCache: TypeAlias = "TensorLike | tuple[TensorLike, ...]"
KVCaches: TypeAlias = "Mapping[str, LayerCache]"


PlainName: TypeAlias = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
LayerNames: TypeAlias = Annotated[tuple[PlainName, ...], Meta(min_length=1, max_length=LAYERS_MAX)]


wire_name = partial(checks.name, most=NAME_CHARS_MAX, error=LayoutError)


def whole_numbers(value: object, what: str) -> tuple[int, ...]:
    return tuple(checks.whole_numbers(value, what, error=LayoutError).tolist())


WireName: TypeAlias = Annotated[str, wire_name]
WholeNumbers: TypeAlias = Annotated[tuple[int, ...], whole_numbers]


def tensors_of(name: str, layer: LayerCache) -> tuple[TensorLike, ...]:
    tensors = tuple(layer) if isinstance(layer, tuple | list) else (layer,)
    if not tensors or not all(try_call(partial(hasattr, tensor, "element_size")) for tensor in tensors):
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors[:4]) or "nothing"
        raise LayoutError(f"layer {name!r}: expected a tensor or a pair of tensors, got {kinds}")
    return tensors


def checked_caches(kv_caches: KVCaches) -> dict[str, LayerCache]:
    """Return `kv_caches`, tensors by layer name, as a new dict. LayoutError if a tensor cannot hold a KV cache."""
    if (unnamed := tensors_in(kv_caches)) is not None:
        hint = '{f"layers.{index}": tensor for index, tensor in enumerate(kv_caches)}'
        raise LayoutError(f"kv_caches: expected a dict of tensors by layer name, got {unnamed}: write {hint}")
    layers: dict[str, Any] = dict(checks.mapping(kv_caches, "kv_caches", error=LayoutError))
    if not 0 < len(layers) <= LAYERS_MAX:
        raise LayoutError(f"kv_caches: expected at least one layer and at most {LAYERS_MAX}, got {len(layers)}")
    for name, layer in layers.items():
        checks.text(name, "kv_caches: a layer's name", most=NAME_CHARS_MAX, error=LayoutError)
        for tensor in tensors_of(name, layer):
            _check_tensor(name, tensor)
    return layers


def tensors_in(kv_caches: object) -> str | None:
    """Return a text that describes `kv_caches` if it is a tensor or a list of tensors without names, else None."""
    if try_call(partial(hasattr, kv_caches, "element_size")):
        return f"a {type(kv_caches).__name__}"
    if isinstance(kv_caches, list | tuple) and any(
        try_call(partial(hasattr, item, "element_size")) or (isinstance(item, list | tuple) and tensors_in(item))
        for item in kv_caches[:1]
    ):
        return f"a {type(kv_caches).__name__} of {len(kv_caches)}"
    return None


_DENSE_LAYOUT = "torch.strided"
_ADDRESSED_KINDS = ("cpu", "cuda")
"""Kinds of devices on which every tensor must have an address. On other devices an address is checked only when used;
blocks that are copied through host buffers need none."""
# Attributes that are true of torch tensors without plain elements in memory that a transport may write.
_UNSUPPORTED = ("is_nested", "is_quantized", "is_complex", "is_neg", "requires_grad")


def _check_tensor(name: str, tensor: TensorLike) -> None:
    unfit = next((flag for flag in _UNSUPPORTED if try_call(partial(_has_flag, tensor, flag))), None)
    if unfit is not None:
        raise LayoutError(f"layer {name!r}: cannot hold a KV cache: {unfit} is true of its tensor")
    memory_layout = try_call(lambda: str(getattr(tensor, "layout", _DENSE_LAYOUT)))
    if memory_layout != _DENSE_LAYOUT:
        raise LayoutError(f"layer {name!r}: cannot hold a KV cache: its tensor's layout is {memory_layout}")
    if try_call(lambda: (tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), tensor.device)) is None:
        raise LayoutError(f"layer {name!r}: expected a tensor, got what has no shape, strides and device")
    if tensor.device.type in _ADDRESSED_KINDS:
        address_of(name, tensor)


def address_of(name: str, tensor: TensorLike) -> int:
    """Return the memory address of a tensor of layer `name`. LayoutError if the tensor has none, as on some devices."""
    address = try_call(partial(_address, tensor))
    if not address and 0 not in tensor.shape:
        raise LayoutError(f"layer {name!r}: its tensor of shape {tuple(tensor.shape)} has no memory (data_ptr)")
    return address or 0


GET_ADDRESS = operator.methodcaller("data_ptr")


class TensorAddresses:
    """The tensors of a registered cache, each with its address at the registration. All reads use these addresses.

    A tensor's owner can move its memory later, for example by `share_memory_()`. Then the addresses are no longer the
    cache's. Tensors without an address, as on some devices, are left out.
    """

    def __init__(self, layers: Iterable[tuple[str, LayerCache]]) -> None:
        tensors_by_id: dict[int, tuple[str, TensorLike]] = {}
        for name, layer in layers:
            for index, tensor in enumerate(tensors_of(name, layer)):
                shown = repr(name) if tensor is layer else f"{name!r}[{index}]"
                if try_call(partial(_address, tensor)):
                    tensors_by_id.setdefault(id(tensor), (shown, tensor))
        self._names = [name for name, _ in tensors_by_id.values()]
        self.tensors = [tensor for _, tensor in tensors_by_id.values()]
        self.registered: list[int] = list(map(GET_ADDRESS, self.tensors))
        """Address of each of `tensors` when the cache was registered."""

    def check(self) -> None:
        """Raise LayoutError, which names the tensor, if one has moved since the cache was registered."""
        found = list(map(GET_ADDRESS, self.tensors))
        if found == self.registered:
            return
        for name, registered, now in zip(self._names, self.registered, found, strict=True):
            if now != registered:
                raise LayoutError(
                    f"layer {name}: its tensor has moved since the cache was registered, from {registered:#x} to "
                    f"{now:#x}, as by share_memory_(), set_() or resize_(): unregister the cache, and register again"
                )


def memory_of(tensor: TensorLike) -> object:
    """Return a key that is equal for tensors at the same address. A tensor without an address gets a unique key."""
    return try_call(partial(_address, tensor)) or ("tensor", id(tensor))


def has_addresses(layers: KVCaches) -> bool:
    """Return True if all tensors of all `layers` have a memory address."""
    tensors = [tensor for name, layer in layers.items() for tensor in tensors_of(name, layer)]
    return all(try_call(partial(_address, tensor)) for tensor in tensors)


def _address(tensor: TensorLike) -> int:
    return tensor.data_ptr()


def _has_flag(tensor: TensorLike, flag: str) -> bool:
    """Return True if the attribute `flag` of the tensor is true or, if it is a method, returns a true value."""
    value = getattr(tensor, flag, False)
    return bool(value() if callable(value) else value)
