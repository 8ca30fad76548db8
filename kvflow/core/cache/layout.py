"""The layout of one rank's KV cache in memory: which bytes belong to (layer, K or V, block).

`KVStyle` lists the supported ways to hold K and V. Strides are read from the tensors. So permuted views, padded blocks
and layers that share one storage work, if the bytes of a block are dense within a region and the elements of a head are
contiguous.

A layout gives a list of regions (`core.cache.regions`): for each layer one for K and one for V, or a single one for
fused K and V or for the latent vectors of MLA. K and V are two regions even if they are neighbours in a block;
`block_map` joins neighbours where both sides of a load allow it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, TypeAlias

from kvflow import checks
from kvflow.checks import Count, Size, counted, first_few, short_repr
from kvflow.core.cache.tensors import (
    FIRST_DRAFT_LAYER,
    LAYERS_MAX,
    KVCaches,
    LayerCache,
    LayerNames,
    PlainName,
    TensorLike,
    WholeNumbers,
    checked_caches,
    tensors_of,
    whole_numbers,
)
from kvflow.errors import LayoutError

PLAIN = "plain"  # kv_format of bytes that are values of the dtype and nothing else
# vLLM's CPU kernels arrange K and V inside a block by the instruction set (_get_attn_isa).
CPU_ISAS = ("amx", "neon", "rvv", "vec", "vec16", "vsx", "vxe")
_FORMATS_OF_WHOLE_HEADS = frozenset(
    ["diffkv", "rocm_x_packed", *(f"{kind}_{isa}" for kind in ("cpu", "cpu_fused") for isa in CPU_ISAS)]
)

# vLLM's FLASHINFER: a block holds K of all heads, then V of all heads, each with its values apart from their scales.
_FORMATS_WITH_SLOTS_OF_K_AND_V = frozenset(["nvfp4", "nvfp4_4over6"])


class KVStyle(enum.StrEnum):
    """How a layer holds K and V: stacked in one tensor, in two tensors, fused in the last axis, or as latent vectors.

    In the shapes, B: blocks, N: tokens of a block, H: heads, D: head elements; N and H are in either order.
    """

    KV_FIRST = "kv_first"  # one tensor (2, B, N, H, D)
    BLOCKS_FIRST = "blocks_first"  # one tensor (B, 2, N, H, D)
    APART = "apart"  # a pair of tensors (B, N, H, D)
    FUSED = "fused"  # one tensor (B, N, H, D); the last axis holds K and V of a head together
    MLA = "mla"  # one tensor (B, N, D): the latent vectors of multi-head latent attention


# The axes of each style in front of the axes within a block; axis "kv" has two entries, K and V.
_OUTER_AXES: dict[KVStyle, tuple[str, ...]] = {
    KVStyle.KV_FIRST: ("kv", "block"),
    KVStyle.BLOCKS_FIRST: ("block", "kv"),
    KVStyle.APART: ("block",),
    KVStyle.FUSED: ("block",),
    KVStyle.MLA: ("block",),
}
_INNER_AXES: dict[str, tuple[str, ...]] = {"NHD": ("token", "head", "dim"), "HND": ("head", "token", "dim")}
_MLA_INNER_AXES = ("token", "dim")

# A layer's index in its model is the only number among the words of its name, as in "model.layers.12.self_attn". If no
# word is a number, it is the only one that ends a word, as in "layer12".
_LAYER_INDEX = re.compile(r"(?:^|[._/])(\d+)(?=[._/]|$)")
_FINAL_NUMBER = re.compile(r"(\d+)(?=[._/]|$)")
_DRAFT = re.compile(r"(?:^|[._/])(?:draft|eagle|mtp|nextn|speculat)")

# The names of a layer's regions, in order.
_PARTS: dict[KVStyle, tuple[str, ...]] = {
    KVStyle.KV_FIRST: ("K", "V"),
    KVStyle.BLOCKS_FIRST: ("K", "V"),
    KVStyle.APART: ("K", "V"),
    KVStyle.FUSED: ("KV",),
    KVStyle.MLA: ("latent",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The layout of all layers of one rank's KV cache. Usually made by `CacheLayout.infer`.

    The constructor raises LayoutError, which names the field, if a value is invalid.
    """

    layer_names: LayerNames
    layer_indices: WholeNumbers
    """Index of each layer in the whole model, of which a pipeline stage holds only some layers."""
    kv_format: PlainName
    """Meaning of the bytes, equal on both sides of a load: "plain" for values of `dtype` and nothing else. Other
    formats have, for example, scales inside a block."""
    style: Style
    order: PlainName
    """Order of the axes tokens (N), heads (H) and head elements (D) in the tensors' shape: "NHD" or "HND"."""
    memory_order: PlainName
    """Order of the axes tokens, heads and head elements in memory, by descending stride: "NHD" or "HND"."""
    dtype: PlainName
    """Name of the dtype without a package, such as "float16"."""
    itemsize: Size
    num_blocks: Size
    block_size: Size
    """Tokens per block."""
    num_kv_heads: Size
    """Size of the axis of heads; 1 for MLA. `kv_heads` says how many KV heads these are."""
    head_size: Size
    """Number of elements on the last axis: of one head; of one head's K and V (FUSED); of one latent vector (MLA)."""

    def __post_init__(self) -> None:
        checks.normalize_fields(self, LayoutError)
        indices, layers = self.layer_indices, len(self.layer_names)
        if len(indices) != layers or len({*indices}) != layers or not 0 <= min(indices) <= max(indices) < LAYERS_MAX:
            raise LayoutError(
                f"layer_indices: expected {counted(layers, 'different number')} from 0, got {short_repr(indices)}"
            )
        for name in ("order", "memory_order"):
            _order(getattr(self, name), name)
        if self.num_kv_heads % self._slots_of_head:
            raise LayoutError(f"num_kv_heads: {self.kv_format} has two slots for each head, got {self.num_kv_heads}")

    @property
    def kv_heads(self) -> int:
        """Number of KV heads of this rank; 1 for MLA."""
        return self.num_kv_heads // self._slots_of_head

    @property
    def _slots_of_head(self) -> int:
        """Number of slots of a KV head on the axis of heads: 2 if K and V have slots of their own, else 1."""
        return 2 if self.style is KVStyle.FUSED and self.kv_format in _FORMATS_WITH_SLOTS_OF_K_AND_V else 1

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the regions of each layer, in order: ("K", "V"), ("KV",) if fused, or ("latent",)."""
        return _PARTS[self.style]

    @property
    def latent(self) -> bool:
        """True if a layer has latent vectors in place of K and V (MLA)."""
        return self.style is KVStyle.MLA

    @property
    def kv_head_size(self) -> int:
        """Number of elements of one head of one token, in K or V alone; for MLA, of the latent vector."""
        return self.head_size // 2 if self.style is KVStyle.FUSED else self.head_size

    @property
    def block_shape(self) -> BlockShape:
        """Where the tokens and heads of a block lie within a region."""
        run = self.head_size * self.itemsize * self._slots_of_head
        tokens, heads = self.block_size, self.kv_heads
        token_stride, head_stride = (heads * run, run) if self.memory_order == "NHD" else (run, tokens * run)
        return BlockShape(tokens, heads, run, token_stride, head_stride)

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block in all layers together, K and V included."""
        return self.block_shape.size_bytes * len(self.parts) * len(self.layer_names)

    @classmethod
    def infer(
        cls,
        kv_caches: KVCaches,
        *,
        order: str,
        block_size: int,
        style: KVStyle | str | None = None,
        layer_indices: Sequence[int] | None = None,
        kv_format: str = PLAIN,
    ) -> CacheLayout:
        """Return the layout that the shapes and strides of the tensors show.

        Args:
            kv_caches: tensors by layer name.
            order: order of the axes in the tensors' shape, "NHD" or "HND".
            block_size: tokens per block; must equal the size of the tensors' token axis.
            style: how layers hold K and V. Needed only for tensors of 5 axes if the first two axes both have size 2.
            layer_indices: index of each layer in the model; needed if names of several layers have no number, several
                numbers, or equal ones. By default the number in the layer's name ("model.layers.12.self_attn"). Layers
                of a draft model, recognized by "draft", "eagle", "mtp", "nextn" or "speculat..." in their names, get
                default indices from 16384 on in the same way; the other side of a load may lack these layers.
            kv_format: name of the format of the bytes, if they are not plain values of the dtype.

        Returns:
            A layout for `Runtime.register_kv_caches`.

        Raises:
            LayoutError: kvflow does not support the tensors' layout, or they do not match the arguments.
        """
        kv_caches = checked_caches(kv_caches)
        block_size = checks.whole(block_size, "block_size", least=1, error=LayoutError)
        order = _order(order, "order")
        name, first = next(iter(kv_caches.items()))
        chosen = _infer_style(name, first) if style is None else _style(style, "style")
        layout = _layout_of_layer(name, first, chosen, order, tuple(kv_caches))
        if layout.block_size != block_size:
            raise LayoutError(
                f"layer {name!r}: block_size is {block_size}, but axis 'token' of shape {_shape_text(name, first)} "
                f"read as {order} has {layout.block_size}"
            )
        layout.check(kv_caches)
        return replace(layout, layer_indices=layer_numbers(tuple(kv_caches), layer_indices), kv_format=kv_format)

    def check(self, kv_caches: KVCaches) -> None:
        """Check that tensors match this layout.

        Args:
            kv_caches: tensors by layer name, in the layout's order of layers.

        Raises:
            LayoutError: a tensor does not match.
        """
        kv_caches = checked_caches(kv_caches)
        if tuple(kv_caches) != self.layer_names:
            raise LayoutError(
                f"layers differ: layout has {_first_names(self.layer_names)}, "
                f"caches have {_first_names(tuple(kv_caches))}"
            )
        for name, layer in kv_caches.items():
            other = _layout_of_layer(name, layer, self.style, self.order, self.layer_names)
            for field in ("dtype", "itemsize", "num_blocks", "block_size", "num_kv_heads", "head_size", "memory_order"):
                expected, actual = getattr(self, field), getattr(other, field)
                if expected != actual:
                    raise LayoutError(f"layer {name!r}: {field} is {actual}, the layout says {expected}")


class BlockShape(NamedTuple):
    """Where the tokens and KV heads of a block lie within a region. Sizes and strides are in bytes.

    Head h of token t begins `t * token_stride + h * head_stride` bytes after the block's start, and has `run` bytes.
    """

    tokens: Count
    heads: Count
    run: Count
    """Bytes of one head of one token, which are contiguous."""
    token_stride: Count
    head_stride: Count

    @property
    def size_bytes(self) -> int:
        return self.tokens * self.heads * self.run


def has_separate_heads(kv_format: str, block: BlockShape) -> bool:
    """Return True if `kv_format` is a format, other than "plain", in which heads of a block can be read one by one.

    In such a format the bytes of a head do not depend on the other heads. In `block` the bytes of each head must also
    be contiguous.
    """
    tokens_in_line = block.tokens == 1 or block.token_stride == block.run
    heads_in_line = block.heads == 1 or block.head_stride == block.tokens * block.run
    return kv_format in _FORMATS_OF_WHOLE_HEADS and tokens_in_line and heads_in_line


def _infer_style(name: str, layer: LayerCache) -> KVStyle:
    tensors = tensors_of(name, layer)
    if len(tensors) > 1:
        return KVStyle.APART
    shape = tuple(tensors[0].shape)
    if len(shape) == 3:
        return KVStyle.MLA
    if len(shape) == 4:
        return KVStyle.FUSED
    if len(shape) == 5 and shape[:2] == (2, 2):
        raise LayoutError(f"layer {name!r}: shape {shape} fits kv_first and blocks_first; pass style=")
    if len(shape) == 5 and shape[0] == 2:
        return KVStyle.KV_FIRST
    if len(shape) == 5 and shape[1] == 2:
        return KVStyle.BLOCKS_FIRST
    raise LayoutError(
        f"layer {name!r}: expected a shape (2, B, ..), (B, 2, ..), (B, N, H, D), (B, N, D) or a (K, V) pair, "
        f"got {counted(len(shape), 'axis', 'axes')}: {shape}"
    )


def _order(order: str, what: str) -> str:
    if not isinstance(order, str) or order not in _INNER_AXES:
        raise LayoutError(f"{what}: expected one of {sorted(_INNER_AXES)}, got {short_repr(order)}")
    return str.__str__(order)


def _style(value: object, what: str) -> KVStyle:
    return KVStyle(checks.one_of(value, what, known=KVStyle, error=LayoutError))


Style: TypeAlias = Annotated[KVStyle, _style]


def axes_of(style: KVStyle, order: str) -> tuple[str, ...]:
    inner = _MLA_INNER_AXES if style is KVStyle.MLA else _INNER_AXES[order]
    return _OUTER_AXES[style] + inner


def _layout_of_layer(
    name: str, layer: LayerCache, style: KVStyle, order: str, layer_names: tuple[str, ...]
) -> CacheLayout:
    tensors = tensors_of(name, layer)
    if (len(tensors) == 2) != (style is KVStyle.APART):
        raise LayoutError(f"layer {name!r}: style {style} wants {'a pair' if style is KVStyle.APART else 'one tensor'}")
    first, last = tensors[0], tensors[-1]
    axes = axes_of(style, order)
    for tensor in tensors:
        if len(tensor.shape) != len(axes):
            raise LayoutError(
                f"layer {name!r}: style {style} has {counted(len(axes), 'axis', 'axes')} ({', '.join(axes)}), "
                f"got shape {tuple(tensor.shape)}"
            )
    facts = [(tuple(t.shape), str(t.dtype), _memory_order(name, style, order, t)) for t in (first, last)]
    if facts[0] != facts[1]:
        raise LayoutError(f"layer {name!r}: K is {facts[0]}, V is {facts[1]}")
    size = dict(zip(axes, first.shape, strict=True))
    if size.get("kv", 2) != 2:
        raise LayoutError(f"layer {name!r}: axis 'kv' of shape {tuple(first.shape)} is {size['kv']}, expected 2")
    if min(size.values()) < 1:
        raise LayoutError(f"layer {name!r}: empty axis in shape {tuple(first.shape)}")
    if style is KVStyle.FUSED and size["dim"] % 2:
        raise LayoutError(f"layer {name!r}: axis 'dim' holds K and V of a head, so it is even; got {size['dim']}")
    return CacheLayout(
        layer_names=layer_names,
        layer_indices=tuple(range(len(layer_names))),
        kv_format=PLAIN,
        style=style,
        order=order,
        memory_order=facts[0][2],
        dtype=str(first.dtype).rpartition(".")[2],
        itemsize=first.element_size(),
        num_blocks=size["block"],
        block_size=size["token"],
        num_kv_heads=size.get("head", 1),
        head_size=size["dim"],
    )


def _memory_order(name: str, style: KVStyle, order: str, tensor: TensorLike) -> str:
    """Return the order of the axes in memory, by descending stride: "NHD" or "HND". Axes of size 1 are ignored.

    LayoutError if the elements of a head are not contiguous. `order`: order of the axes in the tensor's shape.
    """
    axes = axes_of(style, order)
    stride = dict(zip(axes, tensor.stride(), strict=True))
    size = dict(zip(axes, tensor.shape, strict=True))
    inner = [axis for axis in axes if axis not in ("kv", "block")]
    by_stride = sorted((axis for axis in inner if size[axis] > 1), key=lambda axis: -stride[axis])
    for usual, usual_axes in _INNER_AXES.items():
        if [axis for axis in usual_axes if axis in by_stride] == by_stride:
            return usual
    inside = by_stride[-1]  # anything else would be one of the usual orders
    raise LayoutError(
        f"layer {name!r}: the elements of a head are not next to each other in memory: axis {inside!r} has "
        f"stride {stride[inside]}, axis 'dim' has {stride['dim']} (shape {tuple(tensor.shape)})"
    )


_GIVE_INDICES = f"give layer_indices, each layer's index in the model, from 0 to {FIRST_DRAFT_LAYER - 1}"


def is_draft(name: str) -> bool:
    """Return True if a layer's name contains a word for a draft model, such as "draft_model", "eagle" or "mtp"."""
    return _DRAFT.search(name) is not None


def layer_numbers(names: tuple[str, ...], indices: Sequence[int] | None) -> tuple[int, ...]:
    """Return the index in the model of each layer in `names`: `indices` if given, else the number in its name.

    Layers of a draft model are numbered separately, from FIRST_DRAFT_LAYER on. A single layer needs no number.
    LayoutError if the names do not number the layers. Positions would not do: another engine may have another order.
    """
    if indices is not None:
        return whole_numbers(indices, "layer_indices")
    drafts = [name for name in names if is_draft(name)]
    numbers = _numbers([name for name in names if not is_draft(name)])
    numbers |= {name: FIRST_DRAFT_LAYER + number for name, number in _numbers(drafts).items()}
    return tuple(numbers[name] for name in names)


def _numbers(names: Sequence[str]) -> dict[str, int]:
    names_by_number: dict[int, str] = {}
    for name in names:
        numbers = _LAYER_INDEX.findall(name) or _FINAL_NUMBER.findall(name)
        number = int(numbers[0]) if len(numbers) == 1 else -1
        if not 0 <= number < FIRST_DRAFT_LAYER:
            if len(names) == 1:
                return {name: 0}
            has = f"has {counted(len(numbers), 'number')}" if len(numbers) != 1 else f"has the number {number}"
            raise LayoutError(f"layer {name!r}: its name {has}: {_GIVE_INDICES}")
        if number in names_by_number:
            raise LayoutError(
                f"layers {names_by_number[number]!r} and {name!r}: both have the number {number}: {_GIVE_INDICES}"
            )
        names_by_number[number] = name
    return {name: number for number, name in names_by_number.items()}


def _shape_text(name: str, layer: LayerCache) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors_of(name, layer))


def _first_names(names: tuple[str, ...]) -> str:
    return f"{len(names)} ({first_few(names, 4)})"
