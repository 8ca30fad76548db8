"""Which layout an attention backend gives its cache: one table, each row with the source it was read from.

An engine names its backend (vLLM's FLASH_ATTN, ...), or the class that allocates the cache where all its backends
share one (SGLang's pools, TensorRT-LLM's manager). The name does not settle the shape alone: vLLM has changed most
of them twice. So a name may have several rows, and the tensors decide which row it is; where they fit two, the
engine's version does. A row says what shapes cannot: the order of the axes, which orders strides may give, and
whether the bytes are plain values.

A backend that is not in the table needs none of this: describe its layout with `CacheLayout.infer`.

Rows were read from the source packages of vLLM 0.11 to 0.33 (0.15, 0.16, 0.18 and 0.19 lie between equal ones and
were not opened), SGLang 0.5.23 and one commit of TensorRT-LLM. What could not be confirmed there has no row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvflow import checks
from kvflow.core.cache.layout import CacheLayout, KVStyle
from kvflow.core.cache.tensors import NAME_CHARS_MAX, KVCaches, checked_caches
from kvflow.errors import LayoutError

Version: TypeAlias = tuple[int, int]

PLAIN = "plain"

_REPOSITORIES = {
    "vLLM": "https://github.com/vllm-project/vllm/blob/v{version}/{path}",
    "SGLang": "https://github.com/sgl-project/sglang/blob/v{version}/python/{path}",
    "TensorRT-LLM": "https://github.com/NVIDIA/TensorRT-LLM/blob/{version}/{path}",
}
# Engines keep quantized caches as bytes, so these dtypes do not tell what the values are.
_BYTE_DTYPES = ("uint8", "int8")
_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?!\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a row was read: `name` is the class or function in the file that defines the shape."""

    project: str
    version: str
    path: str
    name: str

    @property
    def url(self) -> str:
        return _REPOSITORIES[self.project].format(version=self.version, path=self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLayout:
    """One row: how `backend` shapes its cache in the versions from `since` to `until`, both included.

    `style` and `order` are as in CacheLayout. `kv_formats` is what the bytes may mean; if there is more than one, the
    caller has to say which. `byte_formats` takes its place where the dtype is uint8 or int8. Bytes of another format
    than "plain" move unchanged between caches of the same format, and only in whole blocks.
    """

    backend: str
    style: KVStyle
    source: Source
    order: str = "NHD"
    memory_orders: tuple[str, ...] = ("NHD", "HND")
    kv_formats: tuple[str, ...] = (PLAIN,)
    byte_formats: tuple[str, ...] = ()
    since: Version | None = None
    until: Version | None = None
    view: str = ""
    """What to do first to a tensor as the engine has it."""
    needs_num_kv_heads: bool = False
    """Whether a tensor that was not viewed looks like one that was."""

    @property
    def versions(self) -> str:
        first, last = ("" if v is None else f"{v[0]}.{v[1]}" for v in (self.since, self.until))
        if not first:
            return f"{self.source.project} at {self.source.version[:12]}"
        return f"{self.source.project} {first}{f' to {last}' if last else ' and later'}"

    def covers(self, version: Version) -> bool:
        return (self.since is None or self.since <= version) and (self.until is None or version <= self.until)

    def formats(self, dtype: str) -> tuple[str, ...]:
        return self.byte_formats if self.byte_formats and dtype in _BYTE_DTYPES else self.kv_formats

    def __str__(self) -> str:
        return f"{self.style} {self.order} ({self.versions})"


_BACKENDS = "vllm/v1/attention/backends/"
_SHAPE = "{}.get_kv_cache_shape"
_VIEWS = "vllm/v1/kv_cache_interface.py"


def _vllm(version: str, path: str, name: str) -> Source:
    return Source(project="vLLM", version=version, path=path, name=name)


def _kv_first(
    backend: str, file: str, owner: str, until: Version, *, since: Version = (0, 11), read: str = "0.20.0"
) -> BackendLayout:
    """vLLM's first shape, (2, B, N, H, D); only FLASH_ATTN permutes it."""
    return BackendLayout(
        backend=backend,
        style=KVStyle.KV_FIRST,
        memory_orders=("NHD", "HND") if backend == "FLASH_ATTN" else ("NHD",),
        since=since,
        until=until,
        source=_vllm(read, _BACKENDS + file, _SHAPE.format(owner)),
    )


def _blocks_first(backend: str, file: str, owner: str, since: Version, until: Version) -> BackendLayout:
    """(B, 2, N, H, D): FLASHINFER and TRITON_ATTN from the start, most others from 0.23 on."""
    return BackendLayout(
        backend=backend,
        style=KVStyle.BLOCKS_FIRST,
        memory_orders=("NHD", "HND") if backend in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN") else ("NHD",),
        since=since,
        until=until,
        source=_vllm("0.25.1", _BACKENDS + file, _SHAPE.format(owner)),
    )


def _fused(backend: str, memory_orders: tuple[str, ...] = ("NHD", "HND"), since: Version = (0, 26)) -> BackendLayout:
    """(B, H, N, 2 * D) since 0.26, whatever the strides; since 0.29 it is the one shape of all backends."""
    return BackendLayout(
        backend=backend,
        style=KVStyle.FUSED,
        order="HND",
        memory_orders=memory_orders,
        since=since,
        source=_vllm("0.33.0", _VIEWS, "create_kv_cache_views; before 0.29 the backend's get_kv_cache_shape"),
    )


def _mla(
    backend: str, file: str, owner: str = "MLACommonBackend", *, since: Version = (0, 11), bytes_as: Sequence[str] = ()
) -> BackendLayout:
    """(B, N, D) until 0.28. After that there is an axis of one head, which vLLM's MLA layers drop themselves."""
    in_common = owner == "MLACommonBackend"
    path = "vllm/model_executor/layers/attention/mla_attention.py" if in_common else _BACKENDS + "mla/" + file
    name = f"{owner}.get_kv_cache_shape (used by {file}); since 0.29 MLAAttention.bind_kv_cache"
    return BackendLayout(
        backend=backend,
        style=KVStyle.MLA,
        memory_orders=("NHD",),
        byte_formats=tuple(bytes_as),
        since=since,
        view="from vLLM 0.29 on a layer is (B, 1, N, D): pass tensor.squeeze(1)",
        source=_vllm("0.28.0", path, name),
    )


_PER_TOKEN_HEAD = (PLAIN, "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
# What vLLM's CPU kernels do to K and V inside a block depends on the instruction set (_get_attn_isa).
_CPU_ISAS = ("amx", "neon", "rvv", "vec", "vec16", "vsx", "vxe")

_FLASH = ("FLASH_ATTN", "flash_attn.py", "FlashAttentionBackend")
_FLASHINFER = ("FLASHINFER", "flashinfer.py", "FlashInferBackend")
_TRITON = ("TRITON_ATTN", "triton_attn.py", "TritonAttentionBackend")
_AITER_FA = ("ROCM_AITER_FA", "rocm_aiter_fa.py", "AiterFlashAttentionBackend")
_AITER_UNIFIED = ("ROCM_AITER_UNIFIED_ATTN", "rocm_aiter_unified_attn.py", "RocmAiterUnifiedAttentionBackend")
_HPC = ("HPC_ATTN", "hpc_attn.py", "HpcAttentionBackend")
_SHUFFLED = (PLAIN, "rocm_shuffle")


def _diffkv(backend: str, file: str, owner: str, since: Version) -> tuple[BackendLayout, BackendLayout]:
    """K and V of different sizes in one last axis: (B, N, H, Dk + Dv), since 0.26 (B, H, N, Dk + Dv)."""
    old = BackendLayout(
        backend=backend,
        style=KVStyle.FUSED,
        kv_formats=("diffkv",),
        since=since,
        until=(0, 25),
        source=_vllm("0.25.1", _BACKENDS + file, _SHAPE.format(owner)),
    )
    return old, replace(_fused(backend), kv_formats=("diffkv",))


_CUDA_AND_COMMON = (
    _kv_first(*_FLASH, (0, 22)),
    _blocks_first(*_FLASH, (0, 23), (0, 25)),
    _fused("FLASH_ATTN"),
    replace(_blocks_first(*_FLASHINFER, (0, 11), (0, 25)), byte_formats=(PLAIN, "nvfp4")),
    replace(_fused("FLASHINFER"), byte_formats=(PLAIN, "nvfp4", "nvfp4_4over6")),
    replace(_blocks_first(*_TRITON, (0, 11), (0, 25)), byte_formats=_PER_TOKEN_HEAD),
    replace(_fused("TRITON_ATTN"), byte_formats=_PER_TOKEN_HEAD),
    _kv_first("FLEX_ATTENTION", "flex_attention.py", "FlexAttentionBackend", (0, 22)),
    _fused("FLEX_ATTENTION", ("NHD",)),
    _kv_first("TREE_ATTN", "tree_attn.py", "TreeAttentionBackend", (0, 20)),
    _kv_first("XFORMERS", "xformers.py", "XFormersAttentionBackend", (0, 11), read="0.11.0"),
    _blocks_first(*_HPC, (0, 25), (0, 28)),
    _fused("HPC_ATTN", ("NHD",), (0, 29)),
    *_diffkv("FLASH_ATTN_DIFFKV", "flash_attn_diffkv.py", "FlashAttentionDiffKVBackend", (0, 14)),
    *_diffkv("TRITON_ATTN_DIFFKV", "triton_attn_diffkv.py", "TritonAttentionDiffKVBackend", (0, 24)),
)

_ROCM = (
    # The kernels keep K as (B, H, D / x, N, x) and V as (B, H, D, N) whatever the shape says: heads come first.
    BackendLayout(
        backend="ROCM_ATTN",
        style=KVStyle.KV_FIRST,
        order="HND",
        memory_orders=("HND",),
        kv_formats=("rocm_x_packed",),
        since=(0, 11),
        until=(0, 28),
        view="tensor.view(2, num_blocks, num_kv_heads, block_size, head_size)",
        source=_vllm(
            "0.28.0",
            _BACKENDS + "rocm_attn.py",
            "RocmAttentionBackend.get_kv_cache_shape; PagedAttention.split_kv_cache",
        ),
    ),
    BackendLayout(
        backend="ROCM_ATTN",
        style=KVStyle.BLOCKS_FIRST,
        order="HND",
        memory_orders=("HND",),
        kv_formats=("rocm_x_packed", "rocm_interleaved_v"),
        since=(0, 29),
        view="a layer is (B, 2, N, H * D): pass tensor.view(num_blocks, 2, num_kv_heads, block_size, head_size)",
        source=_vllm(
            "0.33.0", _BACKENDS + "rocm_attn.py", "RocmAttentionBackend.customize_spec; PagedAttention.split_kv_cache"
        ),
    ),
    replace(_kv_first(*_AITER_FA, (0, 22)), kv_formats=_SHUFFLED),
    replace(_blocks_first(*_AITER_FA, (0, 23), (0, 25)), kv_formats=_SHUFFLED),
    replace(_fused("ROCM_AITER_FA", ("HND",)), kv_formats=_SHUFFLED),
    _kv_first(*_AITER_UNIFIED, (0, 22), since=(0, 12)),
    _blocks_first(*_AITER_UNIFIED, (0, 23), (0, 25)),
    replace(_fused("ROCM_AITER_UNIFIED_ATTN", ("HND",)), kv_formats=_SHUFFLED),
)

_CPU_AND_TPU = (
    BackendLayout(
        backend="CPU_ATTN",
        style=KVStyle.KV_FIRST,
        order="HND",
        memory_orders=("HND",),
        kv_formats=tuple(f"cpu_{isa}" for isa in _CPU_ISAS),
        since=(0, 12),
        until=(0, 22),
        source=_vllm("0.22.1", _BACKENDS + "cpu_attn.py", "CPUAttentionBackend.get_kv_cache_shape"),
    ),
    # Shaped like the other fused ones, but a head's bytes are K of all tokens, then V of all tokens.
    replace(
        _fused("CPU_ATTN", ("HND",), (0, 23)),
        kv_formats=tuple(f"cpu_fused_{isa}" for isa in _CPU_ISAS),
        source=_vllm("0.33.0", _BACKENDS + "cpu_attn.py", "CPUAttentionBackendImpl.forward; _get_attn_isa"),
    ),
    # K0, V0, K1, V1, ..: two neighbours of the third axis are one head of a fused cache.
    BackendLayout(
        backend="PALLAS",
        style=KVStyle.FUSED,
        memory_orders=("NHD",),
        since=(0, 11),
        until=(0, 13),
        view="a layer is (B, N, 2 * H, D): pass tensor.view(num_blocks, block_size, num_kv_heads, 2 * head_size)",
        needs_num_kv_heads=True,
        source=_vllm("0.13.0", _BACKENDS + "pallas.py", "PallasAttentionBackend.get_kv_cache_shape; write_to_kv_cache"),
    ),
)

_MLA = (
    _mla("FLASHMLA", "flashmla.py"),
    _mla("CUTLASS_MLA", "cutlass_mla.py"),
    _mla("TRITON_MLA", "triton_mla.py"),
    _mla("FLASHINFER_MLA", "flashinfer_mla.py"),
    _mla("FLASH_ATTN_MLA", "flashattn_mla.py"),
    _mla("ROCM_AITER_MLA", "rocm_aiter_mla.py"),
    _mla("ROCM_AITER_TRITON_MLA", "aiter_triton_mla.py", since=(0, 12)),
    _mla("TOKENSPEED_MLA", "tokenspeed_mla.py", since=(0, 21)),
    _mla("CPU_MLA", "cpu_mla.py", since=(0, 28)),
    _mla(
        "FLASHMLA_SPARSE",
        "flashmla_sparse.py",
        "FlashMLASparseBackend",
        since=(0, 12),
        bytes_as=("fp8_ds_mla", "nvfp4_ds_mla"),
    ),
    _mla("FLASHINFER_MLA_SPARSE", "flashinfer_mla_sparse.py", "FlashInferMLASparseTRTLLMBackend", since=(0, 17)),
    _mla(
        "FLASHINFER_MLA_SPARSE_SM120",
        "flashinfer_mla_sparse.py",
        "FlashInferMLASparseSM120Backend",
        since=(0, 24),
        bytes_as=(PLAIN, "fp8_ds_mla"),
    ),
    _mla("ROCM_AITER_MLA_SPARSE", "rocm_aiter_mla_sparse.py", "ROCMAiterMLASparseBackend", since=(0, 12)),
    _mla("FLASH_ATTN_MLA_SPARSE", "flashattn_mla_sparse.py", "FlashAttnMLASparseBackend", since=(0, 25)),
    _mla("XPU_MLA_SPARSE", "xpu_mla_sparse.py", "XPUMLASparseBackend", since=(0, 20)),
)

_SGLANG_POOLS = "sglang/srt/mem_cache/memory_pool.py"
_TRTLLM_COMMIT = "001541bad83b84ae4c5c4a279e464572d5f690f7"
_TRTLLM_BUFFERS = Source(
    project="TensorRT-LLM",
    version=_TRTLLM_COMMIT,
    path="tensorrt_llm/_torch/pyexecutor/resource_manager.py",
    name="KVCacheManager.get_buffers",
)


def _sglang(backend: str, style: KVStyle, method: str, *, order: str = "NHD", view: str = "") -> BackendLayout:
    return BackendLayout(
        backend=backend,
        style=style,
        order=order,
        memory_orders=(order,),
        since=(0, 5),
        view=view,
        source=Source(project="SGLang", version="0.5.23", path=_SGLANG_POOLS, name=f"{backend}.{method}"),
    )


_SHARED_POOLS = (
    _sglang(
        "MHATokenToKVPool",
        KVStyle.APART,
        "_kv_buffer_shapes",
        view="buffers are (tokens, H, D): pass (k.view(-1, page_size, H, D), v.view(-1, page_size, H, D))",
    ),
    _sglang("MHATokenToKVPool", KVStyle.APART, "_kv_buffer_shapes", order="HND"),
    _sglang(
        "MLATokenToKVPool",
        KVStyle.MLA,
        "_create_buffers",
        view="a buffer is (tokens, 1, D): pass tensor.view(-1, page_size, D)",
    ),
    *(
        BackendLayout(
            backend="KVCacheManager",
            style=KVStyle.BLOCKS_FIRST,
            order=order,
            memory_orders=(order,),
            source=_TRTLLM_BUFFERS,
        )
        for order in ("NHD", "HND")
    ),
)

BACKEND_LAYOUTS: tuple[BackendLayout, ...] = _CUDA_AND_COMMON + _ROCM + _CPU_AND_TPU + _MLA + _SHARED_POOLS
"""The table."""


def known_backends() -> tuple[str, ...]:
    """Every name in the table, as its engine spells it."""
    return tuple(dict.fromkeys(row.backend for row in BACKEND_LAYOUTS))


def rows_of(backend: str, engine_version: str | None = None) -> tuple[BackendLayout, ...]:
    """The rows of a backend, whatever the case of its name; of one version of the engine if it is given."""
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
    """The layout of `kv_caches` as `backend` allocates them.

    `block_size` is that of the tensors: an engine whose kernels split blocks hands out the smaller ones.
    `engine_version` ("0.33.0") is needed only where the tensors fit two versions' shapes; `num_kv_heads` is checked
    if given; `kv_format` is needed where a backend has several for this dtype. Raises LayoutError.
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
            fitting.append((row, _read(kv_caches, row, block_size, num_kv_heads, layer_indices)))
        except LayoutError as error:
            misfits.append(error)
    if not fitting:
        raise _misfit(rows, misfits) from misfits[-1]
    if len(fitting) > 1:
        raise LayoutError(
            f"backend {rows[0].backend}: the tensors fit {' and '.join(str(row) for row, _ in fitting)}; "
            f"pass engine_version=, or CacheLayout.infer(order=..., style=...)"
        )
    row, layout = fitting[0]
    return replace(layout, kv_format=_choose_format(row, layout.dtype, kv_format))


def _parse_version(text: str) -> Version:
    found = _VERSION.match(checks.text(text, "engine_version", error=LayoutError))
    if found is None:
        raise LayoutError(f"engine_version: expected something like '0.33.0', got {text[:80]!r}")
    return int(found[1]), int(found[2])


def _read(
    kv_caches: KVCaches,
    row: BackendLayout,
    block_size: int,
    num_kv_heads: int | None,
    layer_indices: Sequence[int] | None,
) -> CacheLayout:
    """The layout if the tensors are as the row says."""
    layout = CacheLayout.infer(
        kv_caches, order=row.order, style=row.style, block_size=block_size, layer_indices=layer_indices
    )
    # With one head or one token both orders are the same.
    orders_differ = layout.num_kv_heads > 1 and layout.block_size > 1
    if orders_differ and layout.memory_order not in row.memory_orders:
        raise LayoutError(
            f"memory_order: strides give {layout.memory_order}, expected {' or '.join(row.memory_orders)}"
        )
    if num_kv_heads is None and row.needs_num_kv_heads:
        raise LayoutError("num_kv_heads: has to be given, the shape alone does not tell that tensors were viewed")
    if num_kv_heads is not None and layout.num_kv_heads != num_kv_heads and not layout.latent:
        raise LayoutError(f"num_kv_heads is {num_kv_heads}, the tensors have {layout.num_kv_heads}")
    return layout


def _misfit(rows: Sequence[BackendLayout], errors: Sequence[LayoutError]) -> LayoutError:
    reasons = (
        f"{row}: {error}" + (f" [{row.view}]" if row.view else "") for row, error in zip(rows, errors, strict=True)
    )
    return LayoutError(f"backend {rows[0].backend}: the tensors are not as expected. " + "; ".join(reasons))


def _choose_format(row: BackendLayout, dtype: str, given: str | None) -> str:
    possible = row.formats(dtype)
    if given in possible:
        return given
    if given is None and len(possible) == 1:
        return possible[0]
    what = "is needed" if given is None else f"is {given[:80]!r}"
    raise LayoutError(
        f"backend {row.backend}: kv_format {what}, expected one of {list(possible)} for dtype {dtype} ({row.versions})"
    )
