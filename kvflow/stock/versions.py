"""Release lines of vLLM that we speak with, as a table: the fields that each sends, and where they differ.

A peer does not say its version. The fields of its parameters and its metadata tell the line as closely as anything on
the wire depends on it; lines that cannot be told apart are spoken with alike. A line that is not in the table is
refused by name: an older listener dies of our question, and a later one may mean something else.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import NamedTuple


class Counting(enum.StrEnum):
    """Number of readers that a reader reports. The producer's rank waits for as many notifications."""

    ENGINE = "engine"
    """Number of the tensor-parallel ranks that the reader's engine has."""
    RANK = "rank"
    """Number of those that read from that rank."""


class Line(NamedTuple):
    """One release line."""

    version: str
    protocol: int
    """NIXL_CONNECTOR_VERSION of the line, which only the compatibility hash has."""
    counting: Counting
    metadata: tuple[str, ...]
    """The fields of a rank's metadata, in order."""
    params: tuple[str, ...]
    """The keys of `kv_transfer_params` that a producer makes."""
    factors: tuple[str, ...]
    """Factors of the compatibility hash."""

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(map(int, self.version.split(".")))


_Names = tuple[str, ...]

_METADATA_26: _Names = (
    *("engine_id", "agent_metadata", "kv_caches_base_addr", "device_id", "num_blocks", "block_lens"),
    *("kv_cache_layout", "block_size", "ssm_sizes", "attn_backend_name", "physical_blocks_per_logical_kv_block"),
)
_PARALLEL = ("dcp_size", "pcp_size")
_MEMBERS = ("region_members", "packed_member_layouts")
_METADATA_29: _Names = (*_METADATA_26[:6], "block_strides", *_METADATA_26[6:], *_PARALLEL)
_REGIONS = ("region_num_blocks", "region_group_ids", "region_names", "region_mem_types")
_METADATA_30: _Names = (*_METADATA_29[:12], *_REGIONS, *_PARALLEL)
_METADATA_32: _Names = (*_METADATA_30, "ple_block_len", *_MEMBERS)

_PARAMS_26: _Names = (
    *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id"),
    *("remote_host", "remote_port", "tp_size", "remote_num_tokens", "remote_blocks_expiry_time"),
)
_PARAMS_28: _Names = (*_PARAMS_26, "transfer_mode")
_PARAMS_29: _Names = (*_PARAMS_28, "dcp_size", "pp_size")

_FACTORS_26: _Names = (
    *("vllm_version", "nixl_connector_version", "model", "dtype", "num_kv_heads", "head_size", "num_hidden_layers"),
    *("attn_backend_name", "cache_dtype", "is_hma_enabled", "cross_layers_blocks"),
)
_FACTORS_28: _Names = (*_FACTORS_26, "speculative_config", "transfer_mode")
_FACTORS_29 = tuple(name for name in _FACTORS_28 if name != "cross_layers_blocks")

LINES = (
    Line("0.26", 5, Counting.ENGINE, _METADATA_26, _PARAMS_26, _FACTORS_26),
    Line("0.27", 5, Counting.ENGINE, _METADATA_26, _PARAMS_26, _FACTORS_26),
    Line("0.28", 7, Counting.ENGINE, _METADATA_26, _PARAMS_28, _FACTORS_28),
    Line("0.29", 9, Counting.RANK, _METADATA_29, _PARAMS_29, _FACTORS_29),
    Line("0.30", 11, Counting.RANK, _METADATA_30, _PARAMS_29, _FACTORS_29),
    Line("0.31", 13, Counting.RANK, (*_METADATA_30, *_MEMBERS), _PARAMS_29, _FACTORS_29),
    Line("0.32", 14, Counting.RANK, _METADATA_32, _PARAMS_29, _FACTORS_29),
    Line("0.33", 15, Counting.RANK, _METADATA_32, (*_PARAMS_29, "remote_registration_generation"), _FACTORS_29),
)
SPOKEN = f"vLLM {LINES[0].version} to {LINES[-1].version}"


class UnknownLine(ValueError):
    """A version that is not in the table."""


def line_of(version: str) -> Line:
    """The line of a version such as "0.32.0+cpu". UnknownLine names one that is not spoken."""
    number = version.partition("+")[0].split(".")
    found = next((line for line in LINES if line.version.split(".") == number[:2]), None)
    if found is None:
        raise UnknownLine(f"vLLM {version[:80]!a} is not spoken with: {SPOKEN} are")
    return found


def least_line(params: Collection[str]) -> Line:
    """The first line whose producers make parameters with these keys; later ones are the same as far as they tell.

    UnknownLine for those of a line before the table, whose listener would die of the question that we ask.
    """
    if "remote_blocks_expiry_time" not in params:
        what = "parameters without 'remote_blocks_expiry_time' are of vLLM before 0.26"
        raise UnknownLine(f"{what}, whose listener takes no question of ours: {SPOKEN} are spoken with")
    return _last_with(lambda line: line.params, params)


def line_that_shows(metadata: Collection[str]) -> Line:
    """The first line whose ranks show metadata with these fields."""
    return _last_with(lambda line: line.metadata, metadata)


def _last_with(names_of: Callable[[Line], tuple[str, ...]], found: Collection[str]) -> Line:
    """The last of the lines that have nothing but what was found, or the first that is like it."""
    known = [line for line in LINES if set(names_of(line)) <= set(found)] or [LINES[0]]
    most = names_of(known[-1])
    return next(line for line in known if set(names_of(line)) == set(most))
