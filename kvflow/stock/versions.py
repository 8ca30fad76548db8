"""Table of the vLLM release lines that kvflow exchanges with: the fields that each line sends, and where they differ.

A peer does not say its version, but the fields of its parameters and metadata show the release line. Lines that look
the same are treated the same. A line that is not in the table is refused by name: an older listener does not know
kvflow's question, and a later line may mean something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from kvflow.checks import ErrorKind
from kvflow.errors import RequestError

HASH = re.compile("[0-9a-f]{64}")
"""Pattern of vLLM's compatibility hash, a digest of all settings in which two stock engines must agree."""


class ReleaseLine(NamedTuple):
    """One release line of vLLM, such as 0.32, and the fields that its engines send."""

    version: str
    reports_tp_size: bool
    """Meaning of N in a reader's notification "ID:N": if True, the tensor-parallel size of the reader's engine; if
    False, the number of readers of the producer rank that gets the notification."""
    metadata: tuple[str, ...]
    """Fields of a rank's metadata, in the order in which the line sends them."""
    params: tuple[str, ...]
    """Keys of the `kv_transfer_params` that a producer of this line makes, in order."""

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

LINES = (
    ReleaseLine("0.26", True, _METADATA_26, _PARAMS_26),
    ReleaseLine("0.27", True, _METADATA_26, _PARAMS_26),
    ReleaseLine("0.28", True, _METADATA_26, _PARAMS_28),
    ReleaseLine("0.29", False, _METADATA_29, _PARAMS_29),
    ReleaseLine("0.30", False, _METADATA_30, _PARAMS_29),
    ReleaseLine("0.31", False, (*_METADATA_30, *_MEMBERS), _PARAMS_29),
    ReleaseLine("0.32", False, _METADATA_32, _PARAMS_29),
    ReleaseLine("0.33", False, _METADATA_32, (*_PARAMS_29, "remote_registration_generation")),
)
SUPPORTED = f"vLLM {LINES[0].version} to {LINES[-1].version}"


def line_of(version: str, error: ErrorKind = RequestError) -> ReleaseLine:
    """Return the release line of a vLLM version, for example "0.32.0+cpu". Raise `error` if `LINES` lacks the line."""
    number = version.partition("+")[0].split(".")
    found = next((line for line in LINES if line.version.split(".") == number[:2]), None)
    if found is None:
        raise error(f"stock version: vLLM {version[:80]!a} is not supported: {SUPPORTED} are")
    return found


def line_of_params(params: Collection[str]) -> ReleaseLine:
    """Return the oldest release line that makes `kv_transfer_params` with the keys `params`.

    RequestError if only lines older than `LINES` make such parameters: those lines' listeners do not know kvflow's
    question.
    """
    if "remote_blocks_expiry_time" not in params:
        what = "parameters without 'remote_blocks_expiry_time' are from vLLM before 0.26"
        raise RequestError(
            f"stock params: {what}, whose listener does not know kvflow's question: {SUPPORTED} are supported"
        )
    return _line_with_fields(lambda line: line.params, params)


def line_of_metadata(metadata: Collection[str]) -> ReleaseLine:
    """Return the oldest release line that sends rank metadata with the field names `metadata`."""
    return _line_with_fields(lambda line: line.metadata, metadata)


def _line_with_fields(names_of: Callable[[ReleaseLine], tuple[str, ...]], found: Collection[str]) -> ReleaseLine:
    """Return the newest release line that sends only fields in `found`.

    If older lines send the same fields as that line, return the oldest of these lines. `names_of` returns the names of
    a line's metadata fields or parameters. `found` has the names in a peer's message. If no line fits, return the
    oldest line.
    """
    known = [line for line in LINES if set(names_of(line)) <= set(found)] or [LINES[0]]
    most = names_of(known[-1])
    return next(line for line in known if set(names_of(line)) == set(most))
