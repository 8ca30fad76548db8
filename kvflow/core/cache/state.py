"""State per request, which Mamba and linear attention keep in place of a KV cache, described to the planner as blocks.

Each layer has some tensors of shape (slots, ...), such as the last inputs of a convolution and a recurrent state. A
request has one slot: the same index in all these tensors. Tensor-parallel ranks slice a tensor along one axis. The
entries of that axis may be of several kinds, which are sliced separately: Mamba 2's convolution has x, then B, then C.
The entries of one kind are a *segment*. It consists of units, each a run of bytes, and each rank holds some of the
model's units.

To the planner a slot is a block of one token, and the units of a segment are heads. If other axes of a slot come before
the sliced axis, each combination of indices on these axes is a *row*, and each row is a region. The state after a
prompt is the block of the prompt's last token, so a group with state is planned like a group with a window of one
token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from kvflow import checks
from kvflow.checks import Count, Size, counted
from kvflow.core.cache.layout import PLAIN, BlockShape, layer_numbers
from kvflow.core.cache.tensors import (
    KVCaches,
    LayerCache,
    LayerNames,
    TensorLike,
    WholeNumbers,
    WireName,
    address_of,
    checked_caches,
    tensors_of,
)
from kvflow.errors import LayoutError

TENSORS_MAX = 16
SEGMENTS_MAX = 16
ROWS_MAX = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive entries of one kind on a state tensor's sliced axis, such as x, B or C of Mamba 2's convolution.

    Tensor-parallel ranks divide the segment's units. A unit, such as a head, is never split. If the model has fewer
    units than ranks, neighbouring ranks hold the same unit, as with KV heads. The constructor raises LayoutError if
    `size` is not a multiple of `units`.
    """

    name: WireName
    size: Size
    units: Size
    """Number of the segment's units, such as heads, on this rank. Each has `size / units` entries."""
    model_units: Size
    """Number of the segment's units in the whole model."""

    def __post_init__(self) -> None:
        checks.normalize_fields(self, LayoutError)
        if self.size % self.units:
            raise LayoutError(f"segment {self.name!r}: size {self.size} is not a multiple of units, {self.units}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One of the state tensors that each layer has, and how tensor-parallel ranks slice it.

    If a tensor has no segments it is not sliced, and both engines need the same tensor-parallel size.
    """

    name: WireName
    axis: Count = 0
    """Index of the sliced axis within a slot; 0 is the axis after the axis of slots."""
    segments: Segments = ()
    """Segments of the sliced axis, in order. Their sizes add up to the size of the axis. Empty: the tensor is not
    sliced."""

    def __post_init__(self) -> None:
        checks.normalize_fields(self, LayoutError)
        if len({segment.name for segment in self.segments}) < len(self.segments):
            raise LayoutError(f"state tensor {self.name!r}: two of its segments have the same name")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The layout of all layers of a group with state per request. Usually made by `StateLayout.infer`.

    The constructor raises LayoutError, which names the field, if a value is invalid.
    """

    layer_names: LayerNames
    layer_indices: WholeNumbers
    tensors: StateTensors
    """Descriptions of the tensors that each layer has, in order."""
    shapes: Shapes
    """Shape of one slot, for each of the `tensors`."""
    dtypes: LayerNames
    """Name of the dtype, such as "float16", for each of the `tensors`."""
    itemsizes: WholeNumbers
    """Bytes of an element, for each of the `tensors`."""
    num_slots: Size

    def __post_init__(self) -> None:
        checks.normalize_fields(self, LayoutError)
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise LayoutError("tensors: two have the same name")
        for name in ("shapes", "dtypes", "itemsizes"):
            if len(getattr(self, name)) != len(self.tensors):
                raise LayoutError(f"{name}: expected one for each of {counted(len(self.tensors), 'tensor')}")
        if len(self.layer_indices) != len(self.layer_names):
            raise LayoutError(f"layer_indices: expected {len(self.layer_names)}, got {len(self.layer_indices)}")
        for tensor, shape in zip(self.tensors, self.shapes, strict=True):
            _check_shape(f"tensor {tensor.name!r} of a slot of shape {shape}", tensor, shape)

    @classmethod
    def infer(
        cls,
        caches: KVCaches,
        tensors: Sequence[StateTensor],
        *,
        layer_indices: Sequence[int] | None = None,
    ) -> StateLayout:
        """Return the layout that the shapes and strides of the tensors show.

        Args:
            caches: the state tensors by layer name: a tuple of tensors of shape (slots, ...), or one tensor. All layers
                have tensors of the same shapes.
            tensors: descriptions of a layer's tensors, in order.
            layer_indices: index of each layer in the model; by default the number in the layer's name, as in
                `CacheLayout.infer`.

        Returns:
            A layout for a `CacheGroup`.

        Raises:
            LayoutError: the tensors in `caches` do not match the descriptions in `tensors`, or layers differ.
        """
        layers = checked_caches(caches)
        described: tuple[StateTensor, ...] = checks.checked(tensors, "tensors", StateTensors, LayoutError)
        name, first = next(iter(layers.items()))
        facts = _checked_tensors(name, first, described)
        layout = cls(
            layer_names=tuple(layers),
            layer_indices=layer_numbers(tuple(layers), layer_indices),
            tensors=described,
            shapes=tuple(tuple(tensor.shape[1:]) for tensor in facts),
            dtypes=tuple(str(tensor.dtype).rpartition(".")[2] for tensor in facts),
            itemsizes=tuple(tensor.element_size() for tensor in facts),
            num_slots=facts[0].shape[0],
        )
        layout.check(layers)
        return layout

    def check(self, caches: KVCaches) -> None:
        """Check that tensors match this layout.

        Args:
            caches: the state tensors by layer name, in the layout's order of layers: a tuple of tensors of shape
                (slots, ...), or one tensor.

        Raises:
            LayoutError: a tensor does not match, or the bytes of a slot are not dense.
        """
        layers = checked_caches(caches)
        if tuple(layers) != self.layer_names:
            raise LayoutError(f"layers differ: layout has {len(self.layer_names)}, caches have {len(layers)}")
        for name, layer in layers.items():
            checked = _checked_tensors(name, layer, self.tensors)
            for tensor, described, shape, dtype in zip(checked, self.tensors, self.shapes, self.dtypes, strict=True):
                wanted = (self.num_slots, *shape), dtype
                has = tuple(tensor.shape), str(tensor.dtype).rpartition(".")[2]
                if wanted != has:
                    raise LayoutError(f"layer {name!r}: tensor {described.name!r} is {has}, the layout says {wanted}")
                _check_dense(name, described, tensor)

    @property
    def slot_size_bytes(self) -> int:
        """Bytes of one slot in all tensors of all layers together."""
        sizes = (math.prod(shape) * size for shape, size in zip(self.shapes, self.itemsizes, strict=True))
        return sum(sizes) * len(self.layer_names)


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """One segment of one state tensor, in all layers of a group.

    It has the properties of a `CacheLayout` that the planner reads.
    """

    layout: StateLayout
    tensor_index: int
    """Index of the state tensor among the tensors of a layer."""
    segment: Segment
    start: int
    """Index of the segment's first entry on the sliced axis."""
    kv_format: ClassVar[str] = PLAIN
    latent: ClassVar[bool] = False
    block_size: ClassVar[int] = 1
    """Tokens per block: always 1, since to the planner a slot is a block of one token."""

    @property
    def name(self) -> str:
        return f"{self.layout.tensors[self.tensor_index].name}.{self.segment.name}"

    @property
    def layer_indices(self) -> tuple[int, ...]:
        return self.layout.layer_indices

    @property
    def dtype(self) -> str:
        return self.layout.dtypes[self.tensor_index]

    @property
    def num_blocks(self) -> int:
        return self.layout.num_slots

    @property
    def kv_heads(self) -> int:
        """Number of the segment's units on this rank. The planner treats units as heads."""
        return self.segment.units

    @property
    def rows(self) -> int:
        """Number of regions of a layer: one per row, a combination of indices on the axes before the sliced axis."""
        return math.prod(self.layout.shapes[self.tensor_index][: self.layout.tensors[self.tensor_index].axis])

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of a layer's regions, one per row (`rows`): the segment's name and the row's index, like "conv.x.0"."""
        return tuple(f"{self.name}.{row}" for row in range(self.rows))

    @property
    def block_shape(self) -> BlockShape:
        """Shape of a block in one region, for the planner: one token, with the segment's units as contiguous heads."""
        shape, axis = self.layout.shapes[self.tensor_index], self.layout.tensors[self.tensor_index].axis
        inner = math.prod(shape[axis + 1 :]) * self.layout.itemsizes[self.tensor_index]
        run = self.segment.size // self.segment.units * inner
        return BlockShape(1, self.segment.units, run, self.segment.units * run, run)

    def region_addresses(self, caches: Mapping[str, LayerCache]) -> list[tuple[int, int]]:
        """Return (address of slot 0, bytes from one slot to the next) of each region, layer by layer, row by row.

        `caches`: the state tensors by layer name.
        """
        shape, axis = self.layout.shapes[self.tensor_index], self.layout.tensors[self.tensor_index].axis
        inner = math.prod(shape[axis + 1 :]) * self.layout.itemsizes[self.tensor_index]
        row_bytes = shape[axis] * inner
        addresses = []
        for name, layer in caches.items():
            tensor = tensors_of(name, layer)[self.tensor_index]
            slot = math.prod(shape) if self.layout.num_slots == 1 else tensor.stride()[0]
            for row in range(self.rows):
                offset = row * row_bytes + self.start * inner
                addresses.append((address_of(name, tensor) + offset, slot * tensor.element_size()))
        return addresses


def segment_layouts(layout: StateLayout, tp_size: int) -> tuple[SegmentLayout, ...]:
    """Return a `SegmentLayout` for each segment of each tensor in `layout`, in order."""
    segments = []
    for index, (tensor, shape) in enumerate(zip(layout.tensors, layout.shapes, strict=True)):
        start = 0
        for segment in tensor.segments or (_unsliced_segment(shape, tensor.axis, tp_size),):
            segments.append(SegmentLayout(layout, index, segment, start))
            start += segment.size
    return tuple(segments)


def _unsliced_segment(shape: tuple[int, ...], axis: int, tp_size: int) -> Segment:
    """Return a segment that covers the whole axis of a tensor that is not sliced.

    The segment has one unit, and each of the engine's `tp_size` ranks counts as the holder of a different unit. So a
    rank reads the tensor only from the rank with the same index, in an engine of the same size. `shape`: shape of one
    slot. `axis`: index of the axis in `shape`.
    """
    return Segment(name="all", size=shape[axis], units=1, model_units=tp_size)


def _checked_tensors(name: str, layer: LayerCache, described: Sequence[StateTensor]) -> tuple[TensorLike, ...]:
    """Return the tensors of layer `name` as a tuple.

    LayoutError if they do not match their descriptions `described`.
    """
    tensors = tensors_of(name, layer)
    if len(tensors) != len(described):
        raise LayoutError(f"layer {name!r}: expected {counted(len(described), 'tensor')}, got {len(tensors)}")
    for tensor, description in zip(tensors, described, strict=True):
        what = f"layer {name!r}: tensor {description.name!r} of shape {tuple(tensor.shape)}"
        if len(tensor.shape) < 2 or 0 in tensor.shape or tensor.shape[0] != tensors[0].shape[0]:
            raise LayoutError(f"{what}: expected {counted(tensors[0].shape[0], 'slot')}, each with an axis or more")
        _check_shape(what, description, tuple(tensor.shape[1:]))
    return tensors


def _check_shape(what: str, tensor: StateTensor, slot: tuple[int, ...]) -> None:
    if tensor.axis >= len(slot):
        raise LayoutError(f"{what}: it has no axis {tensor.axis} in a slot")
    sizes = [segment.size for segment in tensor.segments]
    if sizes and sum(sizes) != slot[tensor.axis]:
        entries = counted(slot[tensor.axis], "entry", "entries")
        raise LayoutError(f"{what}: axis {tensor.axis} has {entries}, segments have {sizes}")
    if math.prod(slot[: tensor.axis]) > ROWS_MAX:
        raise LayoutError(f"{what}: more than {ROWS_MAX} rows in front of axis {tensor.axis}")


Segments: TypeAlias = Annotated[tuple[Segment, ...], Meta(max_length=SEGMENTS_MAX)]
StateTensors: TypeAlias = Annotated[tuple[StateTensor, ...], Meta(min_length=1, max_length=TENSORS_MAX)]
Shapes: TypeAlias = tuple[tuple[Size, ...], ...]


def _check_dense(name: str, described: StateTensor, tensor: TensorLike) -> None:
    strides, expected = tuple(tensor.stride()), 1
    for size, stride in zip(reversed(tuple(tensor.shape)[1:]), reversed(strides[1:]), strict=True):
        if size > 1 and stride != expected:
            raise LayoutError(
                f"layer {name!r}: tensor {described.name!r}: a slot is not contiguous: shape {tuple(tensor.shape)}, "
                f"strides {strides}"
            )
        expected *= size
    if tensor.shape[0] > 1 and strides[0] < expected:
        raise LayoutError(f"layer {name!r}: tensor {described.name!r}: slots overlap: strides {strides}")
