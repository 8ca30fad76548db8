"""The table of backends, against torch tensors of the shapes its sources give."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvflow.attention_backends import BACKEND_LAYOUTS, BackendLayout, known_backends, layout_for_backend, rows_of
from kvflow.core.cache.layout import CacheLayout, KVStyle
from kvflow.core.cache.regions import map_regions
from kvflow.errors import LayoutError
from tests.support.tests_support import each

B, N, H, D = 5, 4, 3, 8


def allocate(row: BackendLayout, memory_order: str, dtype: torch.dtype = torch.float16) -> Any:
    """One layer as the row's source shapes it, after the view the row asks for."""

    def block_axes(*outer: int, width: int = D) -> torch.Tensor:
        stored = (N, H) if memory_order == "NHD" else (H, N)
        tensor = torch.zeros(*outer, *stored, width, dtype=dtype)
        return tensor if row.order == memory_order else tensor.transpose(-3, -2)

    match row.style:
        case KVStyle.KV_FIRST:
            return block_axes(2, B)
        case KVStyle.BLOCKS_FIRST:
            return block_axes(B, 2)
        case KVStyle.APART:
            return block_axes(B), block_axes(B)
        case KVStyle.FUSED:
            return block_axes(B, width=2 * D)
        case KVStyle.MLA:
            return torch.zeros(B, N, D, dtype=dtype)


def version_of(row: BackendLayout) -> str | None:
    return None if row.since is None else f"{row.since[0]}.{row.since[1]}.0"


def infer(row: BackendLayout, layer: Any, **changes: Any) -> CacheLayout:
    arguments: dict[str, Any] = {"backend": row.backend, "block_size": N, "num_kv_heads": H, **changes}
    return layout_for_backend({"layers.7.attn": layer}, **arguments)


@each("row", BACKEND_LAYOUTS)
@each("with_version", [True, False])
def test_every_row_reads_tensors_of_its_shape(row: BackendLayout, with_version: bool) -> None:
    """Also without a version: five blocks are never taken for K and V."""
    for memory_order, kv_format in itertools.product(row.memory_orders, row.kv_formats):
        layer = allocate(row, memory_order)
        version = version_of(row) if with_version else None
        layout = infer(row, layer, kv_format=kv_format, engine_version=version)
        assert (layout.style, layout.order, layout.memory_order) == (row.style, row.order, memory_order)
        assert (layout.num_blocks, layout.block_size, layout.kv_format) == (B, N, kv_format)
        assert layout.num_kv_heads == (1 if layout.latent else H)
        assert layout.layer_indices == (7,)
        map_regions(layout, {"layers.7.attn": layer})


@each("row", BACKEND_LAYOUTS)
def test_every_row_is_sound_and_names_its_source(row: BackendLayout) -> None:
    assert row.project in ("vLLM", "SGLang", "TensorRT-LLM")
    assert all((row.source_version, row.memory_orders, row.kv_formats))
    assert row.file.endswith(".py")
    assert {row.order, *row.memory_orders} <= {"NHD", "HND"}
    assert row.until is None or (row.since is not None and row.since <= row.until)


def test_names_are_unique_whatever_their_case() -> None:
    names = known_backends()
    assert len({name.casefold() for name in names}) == len(names)


def test_no_two_rows_say_the_same_of_one_version() -> None:
    """Rows of one name and version differ in the order of axes, which the shape tells unless N is H."""
    for a, b in itertools.combinations(BACKEND_LAYOUTS, 2):
        if a.backend != b.backend or (a.style, a.order) != (b.style, b.order):
            continue
        assert a.until is not None
        assert b.since is not None
        assert a.until < b.since


@each("name", ["flash_attn", "Flash_Attn", "mhatokentokvpool"])
def test_case_does_not_matter(name: str) -> None:
    assert {row.backend.casefold() for row in rows_of(name)} == {name.casefold()}


def test_an_unknown_backend_gets_the_known_names_and_the_way_out() -> None:
    problem = r"'MY_ATTN'.*CacheLayout\.infer\(order=.*style=.*FLASH_ATTN.*FLASHMLA"
    with pytest.raises(LayoutError, match=problem) as caught:
        layout_for_backend({"l0": torch.zeros(2, B, N, H, D)}, backend="MY_ATTN", block_size=N)
    assert all(name in str(caught.value) for name in known_backends())


def test_the_version_settles_two_blocks() -> None:
    caches = {"l0": torch.zeros(2, 2, N, H, D)}
    with pytest.raises(LayoutError, match=r"kv_first.*0\.22.*blocks_first.*0\.23.*engine_version"):
        layout_for_backend(caches, backend="FLASH_ATTN", block_size=N)
    for version, style in (("0.22.1", "kv_first"), ("v0.23.0rc1", "blocks_first"), ("0.25", "blocks_first")):
        layout = layout_for_backend(caches, backend="FLASH_ATTN", block_size=N, engine_version=version)
        assert layout.style == style


KV, HND, UNSQUEEZED = torch.zeros(2, B, N, H, D), torch.zeros(2, B, H, N, D), torch.zeros(B, 1, N, D)
SHAPE = f"(2, {B}, {N}, {H}, {D})"
WRONG: dict[str, tuple[str, Any, dict[str, Any], list[str]]] = {
    # what is wrong: (backend, tensor, more arguments, what the message has to contain)
    "another number of axes": ("FLASHINFER", torch.zeros(B, N, D), {}, ["blocks_first", "fused", f"({B}, {N}, {D})"]),
    "another block size": ("FLASH_ATTN", torch.zeros(2, B, N + 1, H, D), {}, ["block_size", str(N), str(N + 1)]),
    "another version's shape": ("FLASH_ATTN", KV, {"engine_version": "0.33.0"}, ["fused", "0.26 and later", SHAPE]),
    "strides the backend does not have": ("TREE_ATTN", torch.zeros(2, B, H, N, D).transpose(2, 3), {}, ["NHD", "HND"]),
    "other heads": ("FLASHINFER", torch.zeros(B, 2, N, H, D), {"num_kv_heads": H + 4}, [str(H), str(H + 4)]),
    "an MLA cache not squeezed": ("FLASHMLA", UNSQUEEZED, {}, ["mla", f"({B}, 1, {N}, {D})", "squeeze(1)"]),
    "a Pallas cache not viewed": (
        "PALLAS",
        torch.zeros(B, N, 2 * H, D),
        {"num_kv_heads": H},
        [str(H), str(2 * H), "view(num_blocks, block_size, num_kv_heads, 2 * head_size)"],
    ),
    "a Pallas cache without heads": ("PALLAS", torch.zeros(B, N, H, 2 * D), {}, ["num_kv_heads", "given"]),
    "an SGLang pool not viewed": (
        "MHATokenToKVPool",
        (torch.zeros(B * N, H, D), torch.zeros(B * N, H, D)),
        {},
        ["apart", f"({B * N}, {H}, {D})", "view(-1, page_size"],
    ),
    "a version before the backend": ("CPU_ATTN", HND, {"engine_version": "0.11.0"}, ["0.11.0", "0.12 to 0.22"]),
    "no version": ("FLASH_ATTN", KV, {"engine_version": "latest"}, ["latest", "0.33.0"]),
    "no layers": ("FLASH_ATTN", None, {}, ["at least one layer"]),
}


@each("what", WRONG)
def test_a_wrong_cache_is_a_layout_error_naming_both(what: str) -> None:
    backend, tensor, changes, expected = WRONG[what]
    caches = {} if tensor is None else {"odd.layer": tensor}
    with pytest.raises(LayoutError) as caught:
        layout_for_backend(caches, backend=backend, block_size=N, **changes)
    for text in (*expected, *([] if "version" in what or tensor is None else [backend])):
        assert text in str(caught.value), f"no {text!r} in {caught.value}"


def test_one_head_has_no_order_in_memory() -> None:
    layout = layout_for_backend(
        {"l0": torch.zeros(2, B, 1, N, D)}, backend="CPU_ATTN", block_size=N, kv_format="cpu_vec"
    )
    assert layout.num_kv_heads == 1


def test_two_orders_of_one_shape_are_not_guessed() -> None:
    with pytest.raises(LayoutError, match=r"NHD.*HND.*CacheLayout\.infer"):
        layout_for_backend({"l0": torch.zeros(B, 2, N, N, D)}, backend="KVCacheManager", block_size=N)


@each(
    ("backend", "dtype", "given", "chosen"),
    [
        ("FLASHMLA", torch.uint8, None, "plain"),  # fp8 values, nothing else in the bytes
        ("FLASHMLA_SPARSE", torch.bfloat16, None, "plain"),
        ("FLASHMLA_SPARSE", torch.uint8, "fp8_ds_mla", "fp8_ds_mla"),
        ("FLASHMLA_SPARSE", torch.uint8, None, None),
        ("FLASHMLA_SPARSE", torch.uint8, "plain", None),
        ("FLASHMLA_SPARSE", torch.bfloat16, "fp8_ds_mla", None),
    ],
)
def test_what_bytes_mean_is_never_guessed(
    backend: str, dtype: torch.dtype, given: str | None, chosen: str | None
) -> None:
    caches = {"l0": torch.zeros(B, N, 656, dtype=dtype)}
    if chosen is None:
        with pytest.raises(LayoutError, match=r"FLASHMLA_SPARSE: kv_format"):
            layout_for_backend(caches, backend=backend, block_size=N, kv_format=given)
        return
    assert layout_for_backend(caches, backend=backend, block_size=N, kv_format=given).kv_format == chosen


def test_slots_of_k_and_v_are_two_for_each_head() -> None:
    slots = {"l0": torch.zeros(B, 2 * H, N, 72, dtype=torch.uint8)}
    layout = layout_for_backend(slots, backend="FLASHINFER", block_size=N, num_kv_heads=H, kv_format="nvfp4")
    assert (layout.kv_heads, layout.block_size_bytes) == (H, 2 * H * N * 72)
    with pytest.raises(LayoutError, match="num_kv_heads: nvfp4 has two slots for each head, got 3"):
        layout_for_backend({"l0": slots["l0"][:, :3]}, backend="FLASHINFER", block_size=N, kv_format="nvfp4")


def test_pallas_viewed_as_fused_holds_k_and_v_of_a_head_together() -> None:
    """The source interleaves K0, V0, K1, V1, ..; the view puts K and V of one head next to each other."""
    keys, values = torch.randn(B, N, H, D), torch.randn(B, N, H, D)
    cache = torch.cat([keys, values], dim=-1).reshape(B, N, 2 * H, D)
    assert torch.equal(cache[:, :, 0], keys[:, :, 0])
    assert torch.equal(cache[:, :, 1], values[:, :, 0])
    viewed = cache.view(B, N, H, 2 * D)
    layout = layout_for_backend({"l0": viewed}, backend="PALLAS", block_size=N, num_kv_heads=H)
    assert (layout.style, layout.head_size) == (KVStyle.FUSED, 2 * D)
    assert torch.equal(viewed[..., :D], keys)
    assert torch.equal(viewed[..., D:], values)


@each("outermost", ["blocks", "sides"])
def test_rocm_attention_is_viewed_in_either_order_of_blocks_and_sides(outermost: str) -> None:
    plain = torch.zeros(B, 2, N, H * D) if outermost == "blocks" else torch.zeros(2, B, N, H * D).transpose(0, 1)
    viewed = plain.view(B, 2, H, N, D)
    layout = layout_for_backend({"l0": viewed}, backend="ROCM_ATTN", block_size=N, kv_format="rocm_x_packed")
    regions = map_regions(layout, {"l0": viewed})
    block_bytes = N * H * D * 4
    assert [int(base) - viewed.data_ptr() for base in regions.bases] == [
        0,
        block_bytes if outermost == "blocks" else B * block_bytes,
    ]
