"""Checks of a stock engine (vLLM with its own NixlConnector): its metadata, and whether kvflow can read from it."""

from __future__ import annotations

from kvflow.checks import counted
from kvflow.core.protocol.codec import WireError
from kvflow.doctor.findings import Finding, fail, ok, warn
from kvflow.errors import KVFlowError
from kvflow.stock.metadata import ask_rank
from kvflow.stock.metadata_conversion import reasons_not_read
from kvflow.stock.versions import LINES, line_of_metadata
from kvflow.stock.wire import StockAnswer, StockMetadata, agent_name_of

_ENGINE, _CACHE, _READ = "stock engine", "stock cache", "reading it"


async def examine_stock(address: str, timeout_s: float) -> list[Finding]:
    """Ask the stock engine at `address` (vLLM with its own NixlConnector) for its metadata, and return the findings.

    Only rank 0 is asked, which every engine has: vLLM's listener expects no question about a missing rank.
    """
    try:
        answer = await ask_rank(address, timeout_s=timeout_s)
    except KVFlowError as error:
        fix = "give VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT of a vLLM with NixlConnector; it must not be older than 0.26"
        return [fail(_ENGINE, str(error), fix)]
    return [*judge_stock(answer)]


def judge_stock(answer: StockAnswer) -> list[Finding]:
    """Return findings about the version, compatibility hash and cache of a stock engine, from its `answer`.

    The last finding says whether kvflow can read from the engine.
    """
    metadata, lines = answer.metadata, [line.version for line in LINES]
    same_metadata = [line.version for line in LINES if line.metadata == line_of_metadata(answer.fields).metadata]
    try:
        agent = agent_name_of(metadata.agent_metadata)
    except WireError as error:
        return [fail(_ENGINE, str(error), "its agent metadata is of an unknown NIXL version")]
    versions = same_metadata[0] if len(same_metadata) == 1 else f"{same_metadata[0]} to {same_metadata[-1]}"
    found = [
        ok(_ENGINE, f"{metadata.engine_id}, agent {agent}, metadata as of vLLM {versions}"),
        ok("its compatibility hash", answer.compatibility_hash),
        ok(_CACHE, describe_cache(metadata)),
    ]
    problems = reasons_not_read(metadata)
    if problems:
        return [
            *found,
            fail(_READ, "; ".join(problems), "attention is read (full, windows, MLA), with blocks in those orders"),
        ]
    unknown = sorted(answer.fields - set(LINES[-1].metadata))
    if unknown:
        what = f"its metadata has fields that vLLM {lines[-1]} does not have: {', '.join(unknown)[:200]}"
        return [*found, warn(_READ, what, "it may be newer than the supported versions; try it on a test fleet")]
    return [*found, ok(_READ, "pin its hash (StockPeers.hashes, or stock.hashes of KVFlowConnector)")]


def describe_cache(metadata: StockMetadata) -> str:
    """Return one line that describes the cache of a stock engine (vLLM with its own NixlConnector)."""
    split = metadata.physical_blocks_per_logical_kv_block
    blocks = f"{counted(metadata.num_blocks, 'block')} of {counted(metadata.block_size, 'token')}"
    kernel = f" ({split} are one block of vLLM's)" if split > 1 else ""
    kinds = ", ".join(sorted(set(metadata.region_mem_types or ["memory unknown"])))
    count = counted(len(metadata.kv_caches_base_addr), "region")
    regions = f"{count} of {blocks}{kernel}, {counted(metadata.block_lens[0], 'byte')} each"
    return f"{regions}, {metadata.kv_cache_layout}, {metadata.attn_backend_name}, {kinds}"
