"""Make tests/stock/golden-0.32.json and its like: what the installed vLLM's own encoders make of known values.

`python tests/vllm/stock_bytes.py tests/stock/golden-0.32.json` in an environment that has vLLM 0.32.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, metadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.request import RequestStatus

LAYERS = 3
METADATA: dict[str, Any] = {
    "engine_id": "prefill-1",
    "agent_metadata": b"nixlSerDes|Agent\x04\0\0\0\0\0\0\0abcd|Conns",
    "kv_caches_base_addr": [140_000_000_000_000 + layer * 35_782_656 for layer in range(LAYERS)],
    "device_id": 0,
    "num_blocks": 364,
    "block_lens": [98304] * LAYERS,
    "block_strides": [98304] * LAYERS,
    "kv_cache_layout": "LBHNC",
    "block_size": 128,
    "ssm_sizes": (0, 0),
    "attn_backend_name": "CPU_ATTN",
    "physical_blocks_per_logical_kv_block": 1,
    "region_num_blocks": [364] * LAYERS,
    "region_group_ids": [0] * LAYERS,
    "region_names": [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)],
    "region_mem_types": ["DRAM"] * LAYERS,
}
QUESTIONS = [(0, 0), (0, 7), (3, 130)]
CLOCKS = [0.0, 12345.678901, 9e9]
NOTIFIED = ("cmpl-9d2f-0-0a1b2c3d", 2)
GROUP_TABLES = ([4, 9, 2, 11, 5], [0, 0, 0, 21, 22])
"""Of five blocks; blocks before the second group's window were given back."""
MODEL = SimpleNamespace(
    model="/m",
    dtype=torch.bfloat16,
    get_total_num_kv_heads=lambda: 3,
    get_head_size=lambda: 64,
    get_total_num_hidden_layers=lambda: LAYERS,
)
CONFIG = SimpleNamespace(
    model_config=MODEL,
    cache_config=SimpleNamespace(cache_dtype="auto"),
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    speculative_config=None,
)
HEARTBEAT = ["cmpl-9d2f-0-0a1b2c3d", "chatcmpl-77"]


def heartbeat() -> bytes:
    """Return a stock worker's heartbeat, from its own method."""
    sent: list[bytes] = []
    worker = SimpleNamespace(
        _ensure_handshake=lambda *_: None,
        _hb_handshake_notif_only=False,
        _engine_last_active={},
        _remote_agents={"e": {(0, 0): "agent"}},
        nixl_wrapper=SimpleNamespace(send_notif=lambda _, notif_msg: sent.append(notif_msg)),
    )
    beat = SimpleNamespace(req_ids=HEARTBEAT, host="", port=0, tp_size=1, dcp_size=1, pp_size=1)
    base_worker.NixlBaseConnectorWorker._send_heartbeats(worker, SimpleNamespace(heartbeat_by_engine={"e": beat}))
    return sent[0]


def params(tables: tuple[list[int], ...], windows: tuple[int, ...]) -> dict[str, Any]:
    """Return a stock scheduler's answer, from its own methods. `windows`: blocks of each group's window; 0 for none."""
    clipped = SimpleNamespace(
        kv_cache_config=SimpleNamespace(select_transfer_block_ids=lambda blocks: blocks),
        _is_hma_required=any(windows),
        blocks_per_sw=windows,
        _ssm_spec_blocks=[None for _ in windows],
    )
    scheduler = SimpleNamespace(
        _stop_heartbeat=lambda _: None,
        is_bidirectional_kv_xfer_enabled=False,
        _kv_lease_duration=30,
        _reqs_need_send={},
        _registration_generation=2,
        get_exchange_clipped_blocks=partial(NixlPullConnectorScheduler.get_exchange_clipped_blocks, clipped),
        engine_id="prefill-1",
        side_channel_host="10.0.0.7",
        side_channel_port=5600,
        transfer_tp_size=1,
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1)
        ),
        _TRANSFER_MODE="pull",
    )
    request = SimpleNamespace(
        request_id=NOTIFIED[0],
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
        num_computed_tokens=300,
    )
    held, found = NixlPullConnectorScheduler.request_finished(scheduler, request, tables)
    assert held
    return found


def golden() -> dict[str, Any]:
    encode = msgspec.msgpack.encode
    whole = metadata.NixlAgentMetadata(**METADATA)
    own_hash = metadata.compute_nixl_compatibility_hash(CONFIG, "CPU_ATTN")
    payload = metadata.NixlHandshakePayload(compatibility_hash=own_hash, agent_metadata_bytes=encode(whole))
    values = {key: value.hex() if isinstance(value, bytes) else value for key, value in METADATA.items()}
    return {
        "vllm": vllm.__version__,
        "protocol": metadata.NIXL_CONNECTOR_VERSION,
        "hash": own_hash,
        "questions": [[*rank, encode((metadata.GET_META_MSG, *rank)).hex()] for rank in QUESTIONS],
        "clocks": [[clock, encode(clock).hex()] for clock in CLOCKS],
        "metadata_values": values,
        "metadata": encode(whole).hex(),
        "payload": encode(payload).hex(),
        "read": [*NOTIFIED, f"{NOTIFIED[0]}:{NOTIFIED[1]}".encode().hex()],
        "heartbeat": [HEARTBEAT, heartbeat().hex()],
        "params": params(([4, 9, 2],), (0,)),
        "group_params": params(GROUP_TABLES, (0, 3)),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(golden(), indent=1) + "\n")
