"""The memory of a cache: its regions, from which plans are made, and the spans to register.

A region is the memory of one layer's K, V, fused K and V, or latent vectors. This module checks that the bytes of a
block are dense within a region; the layout's `BlockShape` describes the inside of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.checks import counted
from kvflow.core.bounds import DeviceIndex, Name
from kvflow.core.cache.layout import BlockShape, CacheLayout, KVStyle, axes_of
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER, KVCaches, LayerCache, TensorLike, address_of, tensors_of
from kvflow.errors import LayoutError

UInt64Array: TypeAlias = npt.NDArray[np.uint64]


class Device(NamedTuple):
    """A device with memory: its kind, such as "cpu" or "cuda", and its number among devices of that kind (CPU: 0)."""

    kind: Name
    number: DeviceIndex


HOST = Device("cpu", 0)
"""The memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """The regions of a cache: in region i, block b starts at address `bases[i] + b * strides[i]`. Strides are in bytes.

    Regions are ordered by layer, then as in `planes`. All have the same number of blocks and the same block shape.
    """

    bases: UInt64Array
    strides: UInt64Array
    block: BlockShape
    planes: tuple[str, ...]
    """Names of the regions of each layer: ("K", "V"), ("KV",) if fused, ("latent",), or `SegmentLayout.parts`."""
    num_blocks: int
    device: Device

    def __len__(self) -> int:
        return len(self.bases)

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block in one region, which are contiguous."""
        return self.block.size_bytes

    @property
    def first_at_address(self) -> tuple[int, ...]:
        """For each region, the index of the first region with the same base address.

        This is the region's own index unless layers share a tensor.
        """
        first_at: dict[int, int] = {}
        return tuple(first_at.setdefault(base, index) for index, base in enumerate(self.bases.tolist()))

    @property
    def distinct(self) -> Regions:
        """These regions without duplicates: of regions with the same base address only the first is kept."""
        kept = [index for index, first in enumerate(self.first_at_address) if index == first]
        return self if len(kept) == len(self) else replace(self, bases=self.bases[kept], strides=self.strides[kept])

    @property
    def distinct_layers(self) -> tuple[int, ...]:
        """Positions, from 0, of the layers. A layer with exactly the same regions as an earlier layer is left out."""
        planes, first_of = len(self.planes), self.first_at_address
        layers: dict[tuple[int, ...], int] = {}
        for layer in range(len(self) // planes):
            layers.setdefault(first_of[layer * planes : (layer + 1) * planes], layer)
        return tuple(layers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A contiguous piece of memory to register: the memory of one tensor, or of several tensors that overlap."""

    address: int
    size_bytes: int


def map_regions(layout: CacheLayout, kv_caches: KVCaches) -> Regions:
    """Return the memory regions of the tensors in `kv_caches`, a dict by layer name. `layout` describes the tensors.

    Raises:
        LayoutError: the tensors do not match `layout`, the bytes of a block are not dense, or regions overlap.
    """
    layout.check(kv_caches)
    device = device_of(kv_caches.items())
    bases: list[int] = []
    strides: list[int] = []
    for name, layer in kv_caches.items():
        for tensor, offset_bytes in _plane_tensors(name, layout.style, layer):
            bases.append(address_of(name, tensor) + offset_bytes)
            strides.append(_block_stride_bytes(name, layout, tensor))
    regions = Regions(
        bases=np.array(bases, dtype=np.uint64),
        strides=np.array(strides, dtype=np.uint64),
        block=layout.block_shape,
        planes=layout.parts,
        num_blocks=layout.num_blocks,
        device=device,
    )
    _check_disjoint(regions, layout.layer_names)
    _check_owners(regions, layout)
    return regions


def _check_owners(regions: Regions, layout: CacheLayout) -> None:
    """Raise LayoutError if a layer of a draft model comes before a layer of the main model that has the same memory.

    If layers share memory, a load reads this memory once, for the first of these layers. If that layer is a draft
    model's, the other side may lack it, and the main model's layer would not be read.
    """
    planes, indices = len(regions.planes), layout.layer_indices
    for index, first in enumerate(regions.first_at_address):
        if indices[first // planes] >= FIRST_DRAFT_LAYER > indices[index // planes]:
            draft, name = layout.layer_names[first // planes], layout.layer_names[index // planes]
            raise LayoutError(f"layer {draft!r} of a draft model comes before {name!r}, whose memory it shares")


def map_spans(layers: Iterable[tuple[str, LayerCache]]) -> tuple[Span, ...]:
    """Return the memory to register: a span for each tensor. Spans that overlap are joined.

    `layers`: (name, tensors) of each layer. Adjacent spans stay apart: they may be separate allocations, which some
    devices cannot register as one.
    """
    pieces = sorted({_extent(name, tensor) for name, layer in layers for tensor in tensors_of(name, layer)})
    joined: list[tuple[int, int]] = []
    for start, end in pieces:
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(Span(address=start, size_bytes=end - start) for start, end in joined)


def device_of(layers: Iterable[tuple[str, LayerCache]]) -> Device:
    """Return the device of all tensors. LayoutError if they lie on several. `layers`: (name, tensors) of each layer."""
    devices = {
        Device(tensor.device.type, tensor.device.index or 0): name
        for name, layer in layers
        for tensor in tensors_of(name, layer)
    }
    if len(devices) != 1:
        where = ", ".join(sorted(f"{device.kind}:{device.number} (layer {name!r})" for device, name in devices.items()))
        raise LayoutError(f"device: expected one for all layers, got {where}")
    return next(iter(devices))


def _plane_tensors(name: str, style: KVStyle, layer: LayerCache) -> list[tuple[TensorLike, int]]:
    """Return (tensor, byte offset in the tensor) of each region of a layer: of K and of V, or of its only region."""
    tensors = tensors_of(name, layer)
    if style not in (KVStyle.KV_FIRST, KVStyle.BLOCKS_FIRST):
        return [(tensor, 0) for tensor in tensors]
    tensor = tensors[0]
    kv_stride = tensor.stride()[axes_of(style, "NHD").index("kv")]
    return [(tensor, 0), (tensor, kv_stride * tensor.element_size())]


def _block_stride_bytes(name: str, layout: CacheLayout, tensor: TensorLike) -> int:
    """Return the bytes from the start of one block to the start of the next, in a tensor of layer `name`.

    LayoutError if the bytes of a block are not dense, or blocks overlap.
    """
    axes = axes_of(layout.style, layout.order)
    stride = dict(zip(axes, tensor.stride(), strict=True))
    size = dict(zip(axes, tensor.shape, strict=True))
    inner = [axis for axis in axes if axis not in ("kv", "block") and size[axis] > 1]
    expected = 1
    for axis in sorted(inner, key=lambda axis: stride[axis]):
        if stride[axis] != expected:
            raise LayoutError(
                f"layer {name!r}: blocks are not contiguous: axis {axis!r} has stride {stride[axis]}, dense is "
                f"{expected} (shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())})"
            )
        expected *= size[axis]
    block_stride = stride["block"] if size["block"] > 1 else expected
    for axis, distance in (("block", block_stride), ("kv", stride.get("kv", expected))):
        if distance < expected:
            raise LayoutError(
                f"layer {name!r}: blocks overlap: axis {axis!r} has stride {distance}, "
                f"a block has {counted(expected, 'element')}"
            )
    return block_stride * tensor.element_size()


def _check_disjoint(regions: Regions, layer_names: tuple[str, ...]) -> None:
    """Raise LayoutError if two regions share bytes, since a load into one region would write into the other.

    Blocks of one region may lie between blocks of another. Layers may also have the same tensor, as in models that
    reuse one layer's KV in other layers; these are read and written as one.
    """
    order = np.argsort(regions.bases, kind="stable")
    bases, strides = regions.bases[order].astype(np.int64), regions.strides[order].astype(np.int64)
    size, planes = regions.block_size_bytes, len(regions.planes)
    ends = np.searchsorted(bases, bases + (regions.num_blocks - 1) * strides + size)
    for index in np.flatnonzero(ends > np.arange(1, len(bases) + 1)):
        others = np.arange(index + 1, ends[index])
        offsets, stride = bases[others] - bases[index], strides[index]
        between = (offsets % stride >= size) & (offsets % stride <= stride - size)
        same = (offsets == 0) & (order[others] % planes == order[index] % planes)
        bad = others[(strides[others] != stride) | ~(between | same)]
        if len(bad):
            earlier, later = (divmod(int(order[position]), planes) for position in (index, bad[0]))
            raise LayoutError(
                f"layer {layer_names[later[0]]!r}: {regions.planes[later[1]]} overlaps {regions.planes[earlier[1]]} of "
                f"layer {layer_names[earlier[0]]!r}: they start {counted(bases[bad[0]] - bases[index], 'byte')} apart, "
                f"block strides are {strides[bad[0]]} and {counted(stride, 'byte')}, a block has {size}"
            )


def _extent(name: str, tensor: TensorLike) -> tuple[int, int]:
    """Return two addresses: of the first byte of a tensor of layer `name`, and just after its last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = address_of(name, tensor)
    return (start, start + (reach + 1) * tensor.element_size())
