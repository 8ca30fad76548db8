"""vLLM's `--kv-cache-dtype`: what kvflow does with the blocks of each value, as a table.

The bytes of a block are plain values, or have a format of their own, with scales or packed values, in which only whole
blocks are read, between equal tensor-parallel sizes. Values that are not in the table are refused at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvflow.core.cache.layout import PLAIN
from kvflow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDtype:
    """A row of the table: a value of `--kv-cache-dtype`."""

    name: str
    since: str
    """First of the read versions of vLLM (0.32 and 0.33) that has the value."""
    state: str
    """"tried": with real servers on the CPU. "read": with tensors as vLLM's source lays them out. "refused": the server
    does not start."""
    kv_format: str
    """Format of the blocks in `CacheLayout.kv_format`; "" if refused."""
    values: str
    """torch's dtype of plain values that vLLM stores as bytes, such as "float8_e4m3fn"; else ""."""


def _rows(text: str) -> dict[str, CacheDtype]:
    rows = ([*("" if word == "-" else word for word in line.split())] for line in text.strip().splitlines())
    return {
        name: CacheDtype(name=name, since=since, state=state, kv_format=kv_format, values=values)
        for name, since, state, kv_format, values in rows
    }


CACHE_DTYPES = _rows(
    f"""
auto                0.32 tried   {PLAIN} -
float16             0.32 read    {PLAIN} -
bfloat16            0.32 read    {PLAIN} -
fp8                 0.32 tried   {PLAIN} float8_e4m3fn
fp8_e4m3            0.32 read    {PLAIN} float8_e4m3fn
fp8_e5m2            0.32 read    {PLAIN} float8_e5m2
fp8_inc             0.32 refused -       -
fp8_ds_mla          0.32 read    fp8_ds_mla -
nvfp4_ds_mla        0.32 read    nvfp4_ds_mla -
int4_per_token_head 0.32 read    int4_per_token_head -
int8_per_token_head 0.32 read    int8_per_token_head -
fp8_per_token_head  0.32 read    fp8_per_token_head -
nvfp4               0.32 read    nvfp4 -
nvfp4_4over6        0.32 read    nvfp4_4over6 -
ultraquant_4bit     0.32 refused -       -
turboquant_k8v4     0.32 refused -       -
turboquant_4bit_nc  0.32 refused -       -
turboquant_k3v4_nc  0.32 refused -       -
turboquant_3bit_nc  0.32 refused -       -
octave_k3v4         0.33 refused -       -
octave_k3v3         0.33 refused -       -
octave_k3v3_compact 0.33 refused -       -
"""
)
"""All rows, by value."""


def cache_dtype_of(name: str) -> CacheDtype:
    """Return the row for a value of vLLM's. ConfigError if kvflow refuses the value or does not know it."""
    row = CACHE_DTYPES.get(name)
    if row is None or not row.kv_format:
        moved = ", ".join(dtype.name for dtype in CACHE_DTYPES.values() if dtype.kv_format)
        raise ConfigError(f"KVFlowConnector: --kv-cache-dtype {name}: its blocks are not transferred; known: {moved}")
    return row
