"""Table of what kvflow's connector gains with each release line of vLLM, and what it does with earlier lines.

docs/reference/vllm-versions.md shows the table. tests/vllm/test_versions.py looks up its names in the vLLM under test.
"""

from __future__ import annotations

from typing import NamedTuple

OLDEST, NEWEST = "0.28", "0.33"
"""Release lines of vLLM that pyproject.toml allows."""


class Change(NamedTuple):
    """A row of the table: something that kvflow can use from a release line on."""

    since: str
    """First release line that has it, such as "0.33"."""
    brings: str
    before: str
    """What kvflow does with earlier release lines."""
    names: tuple[str, ...]
    """What vLLM has from that release line on: "MODULE" or "MODULE:ATTRIBUTE.ATTRIBUTE". Empty if only behaviour
    changed."""


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
CHANGES = (
    Change(
        since="0.30",
        brings="Models with windows, recurrent state or several kinds of attention: a failed load fails its request.",
        before="The server does not start with such a model.",
        names=(f"{_BASE}.get_transfer_results",),
    ),
    Change(
        since="0.30",
        brings="`share_prefixes`: vLLM reports that it reuses a block.",
        before="Prefixes are not shared; a WARNING line says so.",
        names=("vllm.v1.core.block_pool:BlockPool.unpin_blocks",),
    ),
    Change(
        since="0.31",
        brings="`kv_hints`, a parameter of `generate()` and of `Request`.",
        before="Not a parameter.",
        names=("vllm.v1.kv_hints:KvHintsEnvelope",),
    ),
    Change(
        since="0.32",
        brings="vLLM's metrics count loaded tokens as hits of source `p2p`.",
        before="They have no source.",
        names=("vllm.v1.metrics.cache_hit_source:CacheHitSource.P2P",),
    ),
    Change(
        since="0.33",
        brings="[Sleep](../vllm.md#sleep) with a cache on a GPU.",
        before="With `--enable-sleep-mode` or `--enable-cumem-allocator` and such a cache the server does not start.",
        names=(f"{_BASE}.supports_sleep_mode", f"{_BASE}.unregister_kv_caches", f"{_BASE}.restore_kv_caches"),
    ),
    Change(
        since="0.33",
        brings="A request whose prompt is not the prefilled one gets [HTTP 400](../routers.md#what-to-retry).",
        before="It gets HTTP 500, as after a failed load.",
        names=(),
    ),
    Change(
        since="0.33",
        brings="[Stock peers](../stock.md) learn from the parameters that a producer has registered its cache again.",
        before="Stock readers fail until they restart.",
        names=("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata:RemoteMeta.registration_generation",),
    ),
)
