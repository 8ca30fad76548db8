"""A KV cache as its engine hands it over: tensors by layer name, and which of them can be one.

Tensors are read through `TensorLike`, so nothing here needs torch. A tensor can hold a cache if its bytes lie in memory
of its own, where a transport may read and write them: not sparse, quantized, nested or part of a gradient's graph, and
with nothing pending (a lazy conjugate or negative) between the bytes and the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Protocol, TypeAlias

from msgspec import Meta

from kvflow import checks
from kvflow.checks import answer
from kvflow.errors import LayoutError

LAYERS_MAX = 1 << 15
FIRST_DRAFT_LAYER = LAYERS_MAX // 2
"""Number of the first layer of a draft model. Layers from here on may be missing on one side of a load."""
NAMED_LAYERS_MAX = 1 << 10
"""Numbers that layers of a model have in their names. Where several have the same one, such as an attention and its
indexer, the number of the nth in the model's cache is that in its name plus n times this."""
NAME_CHARS_MAX = 1024


class DeviceLike(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


class TensorLike(Protocol):
    """The part of torch.Tensor that a layout reads."""

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
    if not tensors or not all(answer(partial(hasattr, tensor, "element_size")) for tensor in tensors):
        found = ", ".join(type(tensor).__name__ for tensor in tensors[:4]) or "nothing"
        raise LayoutError(f"layer {name!r}: expected a tensor or a pair of tensors, got {found}")
    return tensors


def checked_caches(kv_caches: KVCaches) -> dict[str, LayerCache]:
    """The layers by name, in a dict of our own; LayoutError unless their bytes lie in memory of their own."""
    layers: dict[str, Any] = dict(checks.mapping(kv_caches, "kv_caches", error=LayoutError))
    if not 0 < len(layers) <= LAYERS_MAX:
        raise LayoutError(f"kv_caches: expected at least one layer and at most {LAYERS_MAX}, got {len(layers)}")
    for name, layer in layers.items():
        checks.text(name, "kv_caches: a layer's name", most=NAME_CHARS_MAX, error=LayoutError)
        for tensor in tensors_of(name, layer):
            _check_tensor(name, tensor)
    return layers


_DENSE = "torch.strided"
_ADDRESSED = ("cpu", "cuda")
"""Kinds of devices whose tensors always have addresses. Others' are looked at where they are needed: not if blocks are
staged."""
# What torch says of tensors whose elements are not simply there, one after the other, for everybody to write.
_UNFIT = ("is_nested", "is_quantized", "is_complex", "is_neg", "requires_grad")


def _check_tensor(name: str, tensor: TensorLike) -> None:
    unfit = next((what for what in _UNFIT if answer(partial(_is, tensor, what))), None)
    if unfit is not None:
        raise LayoutError(f"layer {name!r}: cannot hold a KV cache: {unfit} is true of its tensor")
    memory_layout = answer(lambda: str(getattr(tensor, "layout", _DENSE)))
    if memory_layout != _DENSE:
        raise LayoutError(f"layer {name!r}: cannot hold a KV cache: its tensor's layout is {memory_layout}")
    if answer(lambda: (tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), tensor.device)) is None:
        raise LayoutError(f"layer {name!r}: expected a tensor, got what has no shape, strides and device")
    if tensor.device.type in _ADDRESSED:
        address_of(name, tensor)


def address_of(name: str, tensor: TensorLike) -> int:
    """Return where a tensor of a layer lies. LayoutError if it does not say, as the tensors of some devices do not."""
    address = answer(partial(_address, tensor))
    if not address and 0 not in tensor.shape:
        raise LayoutError(f"layer {name!r}: its tensor of shape {tuple(tensor.shape)} has no memory (data_ptr)")
    return address or 0


def memory_of(tensor: TensorLike) -> object:
    """Return a name of a tensor's memory, which tensors share that are one: its address or, without one, itself."""
    return answer(partial(_address, tensor)) or ("tensor", id(tensor))


def has_addresses(layers: KVCaches) -> bool:
    """Return whether all tensors say where they lie."""
    tensors = [tensor for name, layer in layers.items() for tensor in tensors_of(name, layer)]
    return all(answer(partial(_address, tensor)) for tensor in tensors)


def _address(tensor: TensorLike) -> int:
    return tensor.data_ptr()


def _is(tensor: TensorLike, what: str) -> bool:
    """Property of a tensor, by a method or an attribute; False if the tensor has neither."""
    said = getattr(tensor, what, False)
    return bool(said() if callable(said) else said)
