"""The cache layouts of attention backends, as a table. Each row names the source file that it was read from.

A row has the name of an attention backend, such as vLLM's FLASH_ATTN, or, if all backends of an engine share an
allocator, of the allocator's class, as for SGLang and TensorRT-LLM. vLLM has changed most shapes twice, so a name may
have several rows. The tensors decide which row applies; if they fit two, the engine's version decides. A row also has
facts that shapes cannot show: the order of the axes, the possible orders by strides, and whether the bytes are plain
values.

For a backend without a row use `CacheLayout.infer`.

The rows were read from the source packages of vLLM 0.11 to 0.33 (without 0.15, 0.16, 0.18 and 0.19, since the versions
around them are equal), SGLang 0.5.23 and one commit of TensorRT-LLM. A layout that could not be confirmed in a source
has no row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvflow import checks
from kvflow.core.cache.layout import CPU_ISAS, PLAIN, CacheLayout, KVStyle
from kvflow.core.cache.tensors import NAME_CHARS_MAX, KVCaches, checked_caches
from kvflow.errors import LayoutError

Version: TypeAlias = tuple[int, int]

# Engines keep quantized caches as bytes, so these dtypes do not show the format of the values.
_BYTE_DTYPES = ("uint8", "int8")
_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?!\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLayout:
    """A row of the table: the layout of the KV cache that `backend` allocates in some versions of its project."""

    backend: str
    """Name of the attention backend, or of the class that allocates the cache."""
    style: KVStyle
    project: str
    """Project of the backend, such as "vLLM"."""
    source_version: str
    """Version or commit of the project's source from which this row was read."""
    file: str
    """Path, in the project's repository, of the file that defines the shape."""
    order: str
    """Order of the axes in the tensors' shape, "NHD" or "HND"."""
    memory_orders: tuple[str, ...]
    """Possible orders of the axes in memory, by the tensors' strides: "NHD", "HND" or both."""
    kv_formats: tuple[str, ...]
    """Possible values of `CacheLayout.kv_format`. If there are several, the caller of `layout_for_backend` has to
    choose. Bytes that are not "plain" are copied unchanged between caches of the same format, in whole blocks or in
    whole heads of a block."""
    byte_formats: tuple[str, ...]
    """Possible values of `CacheLayout.kv_format` for tensors of dtype uint8 or int8, if they differ from `kv_formats`;
    else empty.
    """
    since: Version | None
    """First version of the backend's `project` with this layout; None if only the commit `source_version` is known to
    have the layout."""
    until: Version | None
    """Last version of the backend's `project` with this layout; None if all versions after `since` have the layout."""
    view: str
    """Text for a message: which view of the engine's tensor has this layout; "" if the tensor itself has it."""
    needs_num_kv_heads: bool
    """True if the shape does not show whether the caller passed the engine's tensor or the view of it that `view`
    describes; then `layout_for_backend` needs `num_kv_heads`."""

    @property
    def versions(self) -> str:
        first, last = ("" if v is None else f"{v[0]}.{v[1]}" for v in (self.since, self.until))
        if not first:
            return f"{self.project} at {self.source_version[:12]}"
        return f"{self.project} {first}{f' to {last}' if last else ' and later'}"

    def covers(self, version: Version) -> bool:
        return (self.since is None or self.since <= version) and (self.until is None or version <= self.until)

    def formats(self, dtype: str) -> tuple[str, ...]:
        return self.byte_formats if self.byte_formats and dtype in _BYTE_DTYPES else self.kv_formats

    def __str__(self) -> str:
        return f"{self.style} {self.order} ({self.versions})"


# Possible formats of the bytes: for any dtype, then for uint8 and int8 if they differ there.
_FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": ((PLAIN,), ()),
    "nvfp4": ((PLAIN,), (PLAIN, "nvfp4")),
    "nvfp4_4over6": ((PLAIN,), (PLAIN, "nvfp4", "nvfp4_4over6")),
    "token_head": ((PLAIN,), (PLAIN, "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")),
    "ds_mla": ((PLAIN,), ("fp8_ds_mla", "nvfp4_ds_mla")),
    "fp8_ds_mla": ((PLAIN,), (PLAIN, "fp8_ds_mla")),
    "diffkv": (("diffkv",), ()),  # K and V of different sizes in one last axis
    "shuffle": ((PLAIN, "rocm_shuffle"), ()),
    "x_packed": (("rocm_x_packed",), ()),
    "interleaved": (("rocm_x_packed", "rocm_interleaved_v"), ()),
    "cpu": (tuple(f"cpu_{isa}" for isa in CPU_ISAS), ()),
    "cpu_fused": (tuple(f"cpu_fused_{isa}" for isa in CPU_ISAS), ()),
}

# Texts for `BackendLayout.view`, by the name in the table.
_VIEWS = {
    "-": "",
    "heads": "tensor.view(2, num_blocks, num_kv_heads, block_size, head_size)",
    "split": "a layer is (B, 2, N, H * D): pass tensor.view(num_blocks, 2, num_kv_heads, block_size, head_size)",
    # K0, V0, K1, V1, ..: two neighbours of the third axis are one head of a fused cache.
    "pairs": "a layer is (B, N, 2 * H, D): pass tensor.view(num_blocks, block_size, num_kv_heads, 2 * head_size)",
    "squeeze": "from vLLM 0.29 on a layer is (B, 1, N, D): pass tensor.squeeze(1)",
    "pages": "buffers are (tokens, H, D): pass (k.view(-1, page_size, H, D), v.view(-1, page_size, H, D))",
    "latents": "a buffer is (tokens, 1, D): pass tensor.view(-1, page_size, D)",
}
_NEEDS_NUM_KV_HEADS = "pairs"


def _rows(project: str, folder: str, text: str) -> Iterator[BackendLayout]:
    """Parse `text`, which has one row of the table per line, and yield the rows, all of `project`.

    `folder`: path, in the project's repository, of the files that the lines name. A name that begins with "/" is the
    whole path.
    """
    for line in text.strip().splitlines():
        backend, versions, style, order, strides, formats, view, source_version, file = line.split()
        kv_formats, byte_formats = _FORMATS[formats]
        since, _, until = versions.partition("-")
        yield BackendLayout(
            backend=backend,
            style=KVStyle(style),
            project=project,
            source_version=source_version,
            file=file.removeprefix("/") if file.startswith("/") else folder + file,
            order=order,
            memory_orders=("NHD", "HND") if strides == "any" else (strides,),
            kv_formats=kv_formats,
            byte_formats=byte_formats,
            since=_parse_version(since) if since else None,
            until=_parse_version(until) if until else None,
            view=_VIEWS[view],
            needs_num_kv_heads=view == _NEEDS_NUM_KV_HEADS,
        )


def _parse_version(text: str) -> Version:
    match = _VERSION.match(checks.text(text, "engine_version", error=LayoutError))
    if match is None:
        raise LayoutError(f"engine_version: expected something like '0.33.0', got {text[:80]!r}")
    return int(match[1]), int(match[2])


# Columns: backend, versions, style, axes, strides, bytes, view, version that was read, file in the repository
# (vllm-project/vllm; sgl-project/sglang, below python/; NVIDIA/TensorRT-LLM).
#
# (2, B, N, H, D) is vLLM's first shape. (B, 2, N, H, D) is the shape of FLASHINFER and TRITON_ATTN from the start, and
# of most others from 0.23 on. (B, H, N, 2 * D) is the shape of all since 0.26 or 0.29, whatever the strides. The
# kernels of ROCM_ATTN keep K as (B, H, D / x, N, x) and V as (B, H, D, N), whatever the shape: heads come first. The
# fused blocks of CPU_ATTN hold K of all tokens of a head, then V of all tokens. MLA is (B, N, D) until 0.28. Later
# versions add an axis of one head, which vLLM's MLA layers drop themselves.
BACKEND_LAYOUTS: tuple[BackendLayout, ...] = (
    *_rows(
        "vLLM",
        "vllm/v1/attention/backends/",
        """
FLASH_ATTN              0.11-0.22 kv_first     NHD any plain        -     0.20.0 flash_attn.py
FLASH_ATTN              0.23-0.25 blocks_first NHD any plain        -     0.25.1 flash_attn.py
FLASH_ATTN              0.26-     fused        HND any plain        -     0.33.0 /vllm/v1/kv_cache_interface.py
FLASHINFER              0.11-0.25 blocks_first NHD any nvfp4        -     0.25.1 flashinfer.py
FLASHINFER              0.26-     fused        HND any nvfp4_4over6 -     0.33.0 /vllm/v1/kv_cache_interface.py
TRITON_ATTN             0.11-0.25 blocks_first NHD any token_head   -     0.25.1 triton_attn.py
TRITON_ATTN             0.26-     fused        HND any token_head   -     0.33.0 /vllm/v1/kv_cache_interface.py
FLEX_ATTENTION          0.11-0.22 kv_first     NHD NHD plain        -     0.20.0 flex_attention.py
FLEX_ATTENTION          0.26-     fused        HND NHD plain        -     0.33.0 /vllm/v1/kv_cache_interface.py
TREE_ATTN               0.11-0.20 kv_first     NHD NHD plain        -     0.20.0 tree_attn.py
XFORMERS                0.11-0.11 kv_first     NHD NHD plain        -     0.11.0 xformers.py
HPC_ATTN                0.25-0.28 blocks_first NHD NHD plain        -     0.25.1 hpc_attn.py
HPC_ATTN                0.29-     fused        HND NHD plain        -     0.33.0 /vllm/v1/kv_cache_interface.py
FLASH_ATTN_DIFFKV       0.14-0.25 fused        NHD any diffkv       -     0.25.1 flash_attn_diffkv.py
FLASH_ATTN_DIFFKV       0.26-     fused        HND any diffkv       -     0.33.0 /vllm/v1/kv_cache_interface.py
TRITON_ATTN_DIFFKV      0.24-0.25 fused        NHD any diffkv       -     0.25.1 triton_attn_diffkv.py
TRITON_ATTN_DIFFKV      0.26-     fused        HND any diffkv       -     0.33.0 /vllm/v1/kv_cache_interface.py
ROCM_ATTN               0.11-0.28 kv_first     HND HND x_packed     heads 0.28.0 rocm_attn.py
ROCM_ATTN               0.29-     blocks_first HND HND interleaved  split 0.33.0 rocm_attn.py
ROCM_AITER_FA           0.11-0.22 kv_first     NHD NHD shuffle      -     0.20.0 rocm_aiter_fa.py
ROCM_AITER_FA           0.23-0.25 blocks_first NHD NHD shuffle      -     0.25.1 rocm_aiter_fa.py
ROCM_AITER_FA           0.26-     fused        HND HND shuffle      -     0.33.0 /vllm/v1/kv_cache_interface.py
ROCM_AITER_UNIFIED_ATTN 0.12-0.22 kv_first     NHD NHD plain        -     0.20.0 rocm_aiter_unified_attn.py
ROCM_AITER_UNIFIED_ATTN 0.23-0.25 blocks_first NHD NHD plain        -     0.25.1 rocm_aiter_unified_attn.py
ROCM_AITER_UNIFIED_ATTN 0.26-     fused        HND HND shuffle      -     0.33.0 /vllm/v1/kv_cache_interface.py
CPU_ATTN                0.12-0.22 kv_first     HND HND cpu          -     0.22.1 cpu_attn.py
CPU_ATTN                0.23-     fused        HND HND cpu_fused    -     0.33.0 cpu_attn.py
PALLAS                  0.11-0.13 fused        NHD NHD plain        pairs 0.13.0 pallas.py
""",
    ),
    *_rows(
        "vLLM",
        "vllm/model_executor/layers/attention/",
        """
FLASHMLA              0.11- mla NHD NHD plain squeeze 0.28.0 mla_attention.py
CUTLASS_MLA           0.11- mla NHD NHD plain squeeze 0.28.0 mla_attention.py
TRITON_MLA            0.11- mla NHD NHD plain squeeze 0.28.0 mla_attention.py
FLASHINFER_MLA        0.11- mla NHD NHD plain squeeze 0.28.0 mla_attention.py
FLASH_ATTN_MLA        0.11- mla NHD NHD plain squeeze 0.28.0 mla_attention.py
ROCM_AITER_MLA        0.11- mla NHD NHD plain squeeze 0.28.0 mla_attention.py
ROCM_AITER_TRITON_MLA 0.12- mla NHD NHD plain squeeze 0.28.0 mla_attention.py
TOKENSPEED_MLA        0.21- mla NHD NHD plain squeeze 0.28.0 mla_attention.py
CPU_MLA               0.28- mla NHD NHD plain squeeze 0.28.0 mla_attention.py
AMX_MLA               0.32- mla NHD NHD plain squeeze 0.32.0 mla_attention.py
""",
    ),
    *_rows(
        "vLLM",
        "vllm/v1/attention/backends/mla/",
        """
FLASHMLA_SPARSE             0.12- mla NHD NHD ds_mla     squeeze 0.28.0 flashmla_sparse.py
FLASHINFER_MLA_SPARSE       0.17- mla NHD NHD plain      squeeze 0.28.0 flashinfer_mla_sparse.py
FLASHINFER_MLA_SPARSE_SM120 0.24- mla NHD NHD fp8_ds_mla squeeze 0.28.0 flashinfer_mla_sparse.py
ROCM_AITER_MLA_SPARSE       0.12- mla NHD NHD plain      squeeze 0.28.0 rocm_aiter_mla_sparse.py
FLASH_ATTN_MLA_SPARSE       0.25- mla NHD NHD plain      squeeze 0.28.0 flashattn_mla_sparse.py
XPU_MLA_SPARSE              0.20- mla NHD NHD plain      squeeze 0.28.0 xpu_mla_sparse.py
""",
    ),
    *_rows(
        "SGLang",
        "sglang/srt/mem_cache/",
        """
MHATokenToKVPool 0.5- apart NHD NHD plain pages   0.5.23 memory_pool.py
MHATokenToKVPool 0.5- apart HND HND plain -       0.5.23 memory_pool.py
MLATokenToKVPool 0.5- mla   NHD NHD plain latents 0.5.23 memory_pool.py
""",
    ),
    *_rows(
        "TensorRT-LLM",
        "tensorrt_llm/_torch/pyexecutor/",
        """
KVCacheManager - blocks_first NHD NHD plain - 001541bad83b84ae4c5c4a279e464572d5f690f7 resource_manager.py
KVCacheManager - blocks_first HND HND plain - 001541bad83b84ae4c5c4a279e464572d5f690f7 resource_manager.py
""",
    ),
)
"""All rows of the table of cache layouts."""


def known_backends() -> tuple[str, ...]:
    """Return the names of all backends in the table, once each, in the engine's spelling."""
    return tuple(dict.fromkeys(row.backend for row in BACKEND_LAYOUTS))


def rows_of(backend: str, engine_version: str | None = None) -> tuple[BackendLayout, ...]:
    """Return the table's rows for `backend`, a name in upper or lower case. LayoutError if there is none.

    If `engine_version` is given, return only the rows for that version of the engine.
    """
    backend = checks.text(backend, "backend", error=LayoutError)
    rows = tuple(row for row in BACKEND_LAYOUTS if row.backend.casefold() == backend.casefold())
    if not rows:
        raise LayoutError(
            f"backend {backend[:80]!r} is not known; describe its layout with CacheLayout.infer(order=..., style=...). "
            f"Known: {', '.join(known_backends())}"
        )
    if engine_version is None:
        return rows
    version = _parse_version(engine_version)
    covering = tuple(row for row in rows if row.covers(version))
    if not covering:
        raise LayoutError(
            f"backend {rows[0].backend}: no layout known for version {engine_version!r}, "
            f"known are {'; '.join(map(str, rows))}"
        )
    return covering


def layout_for_backend(
    kv_caches: KVCaches,
    *,
    backend: str,
    block_size: int,
    engine_version: str | None = None,
    num_kv_heads: int | None = None,
    kv_format: str | None = None,
    layer_indices: Sequence[int] | None = None,
) -> CacheLayout:
    """Return the layout of a cache that an attention backend has allocated.

    Args:
        kv_caches: tensors by layer name.
        backend: name of the attention backend, in upper or lower case.
        block_size: tokens of a block in the tensors; if the engine's kernels split the engine's blocks, the size of a
            kernel's block.
        engine_version: version of the engine, such as "0.33.0". Needed only if the tensors fit the shapes of two
            versions.
        num_kv_heads: KV heads of this rank, to check the tensors against.
        kv_format: format of the bytes, as in `CacheLayout.kv_format`. Needed only if the backend has several formats
            for the tensors' dtype.
        layer_indices: index of each layer in the model. By default the number in the layer's name, as in
            `CacheLayout.infer`.

    Returns:
        A layout for `Runtime.register_kv_caches`.

    Raises:
        LayoutError: the table has no row for the backend, or no row matches the tensors.
    """
    kv_caches = checked_caches(kv_caches)
    if num_kv_heads is not None:
        num_kv_heads = checks.whole(num_kv_heads, "num_kv_heads", least=1, error=LayoutError)
    if kv_format is not None:
        kv_format = checks.text(kv_format, "kv_format", most=NAME_CHARS_MAX, error=LayoutError)
    rows = rows_of(backend, engine_version)
    fitting: list[tuple[BackendLayout, CacheLayout]] = []
    misfits: list[LayoutError] = []
    for row in rows:
        try:
            fitting.append((row, _layout_by_row(kv_caches, row, block_size, num_kv_heads, layer_indices, kv_format)))
        except LayoutError as error:
            misfits.append(error)
    if not fitting:
        raise _mismatch_error(rows, misfits) from misfits[-1]
    if len(fitting) > 1:
        raise LayoutError(
            f"backend {rows[0].backend}: the tensors fit {' and '.join(str(row) for row, _ in fitting)}; "
            f"pass engine_version=, or CacheLayout.infer(order=..., style=...)"
        )
    row, layout = fitting[0]
    return replace(layout, kv_format=_choose_format(row, layout.dtype, kv_format))


def _layout_by_row(
    kv_caches: KVCaches,
    row: BackendLayout,
    block_size: int,
    num_kv_heads: int | None,
    layer_indices: Sequence[int] | None,
    kv_format: str | None,
) -> CacheLayout:
    """Return the layout that the tensors `kv_caches` have according to the table row `row`.

    Raise LayoutError if `row` does not match the tensors.
    """
    layout = CacheLayout.infer(
        kv_caches,
        order=row.order,
        style=row.style,
        block_size=block_size,
        layer_indices=layer_indices,
        kv_format=kv_format or PLAIN,
    )
    # With one head or one token both orders are the same.
    orders_differ = layout.num_kv_heads > 1 and layout.block_size > 1
    if orders_differ and layout.memory_order not in row.memory_orders:
        raise LayoutError(
            f"memory_order: strides give {layout.memory_order}, expected {' or '.join(row.memory_orders)}"
        )
    if num_kv_heads is None and row.needs_num_kv_heads:
        raise LayoutError("num_kv_heads: has to be given, the shape alone does not tell that tensors were viewed")
    if num_kv_heads is not None and layout.kv_heads != num_kv_heads and not layout.latent:
        raise LayoutError(f"num_kv_heads is {num_kv_heads}, the tensors have {layout.kv_heads}")
    return layout


def _mismatch_error(rows: Sequence[BackendLayout], errors: Sequence[LayoutError]) -> LayoutError:
    reasons = (
        f"{row}: {error}" + (f" [{row.view}]" if row.view else "") for row, error in zip(rows, errors, strict=True)
    )
    return LayoutError(f"backend {rows[0].backend}: the tensors are not as expected. " + "; ".join(reasons))


def _choose_format(row: BackendLayout, dtype: str, kv_format: str | None) -> str:
    possible = row.formats(dtype)
    if kv_format in possible:
        return kv_format
    if kv_format is None and len(possible) == 1:
        return possible[0]
    problem = "is needed" if kv_format is None else f"is {kv_format[:80]!r}"
    raise LayoutError(
        f"backend {row.backend}: kv_format {problem}, expected one of {list(possible)} "
        f"for dtype {dtype} ({row.versions})"
    )
