"""Dynamo's vLLM worker with `KVFLOW_AS_NIXL=1`, up to the engine that it starts: which needs no service of Dynamo's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.vllm.servers import HOME, MODEL, python_path

DYNAMO = HOME / "dynamo"
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
TIERS = [{"router_capabilities": ["router_hint"], "control_advertise_host": "10.0.0.7", "control_ports": [5600]}]
WHAT_DYNAMO_MAKES = """
import json
import os

from dynamo.llm import WorkerType
from dynamo.vllm.args import parse_args
from dynamo.vllm.kv_connector_protocols import make_kv_connector_protocol
from dynamo.vllm.kv_hints import resolve_kv_transfer_hint_sources
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvflow.vllm.extra_config import config_of, extra_of

arguments = parse_args().engine_args
config = arguments.create_engine_config()
connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
hints = resolve_kv_transfer_hint_sources(arguments, WorkerType.Prefill)
print(json.dumps({
    "connector": f"{connector.__module__}.{connector.__name__}",
    "host": os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"],
    "listen": config_of(config, tp_rank=0, pp_rank=0).listen if "kvflow" in connector.__module__ else None,
    "params": make_kv_connector_protocol(config).prefill_request_kv_transfer_params(),
    "hints": hints and hints[0].source_control_endpoint,
}))
"""


def made_by_dynamo(switch: str, port: int, **extra: Any) -> dict[str, Any]:
    """Return the configuration that a prefill worker makes of its command line, in a process of its own."""
    transfer = json.dumps({**CONNECTOR, "kv_connector_extra_config": extra})
    command = [sys.executable, "-c", WHAT_DYNAMO_MAKES, "--model", str(MODEL), "--dtype", "float32"]
    command += ["--disaggregation-mode", "prefill", "--kv-transfer-config", transfer]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((python_path(), str(DYNAMO))),
        "HF_HUB_OFFLINE": "1",
        "KVFLOW_AS_NIXL": switch,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr[-3000:]
    made: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return made


@pytest.mark.skipif(not DYNAMO.exists(), reason="Dynamo is not installed: python3 dev.py vllm")
@pytest.mark.parametrize("switch", ["0", "1"])
def test_dynamos_worker_starts_the_connector_that_the_switch_says(switch: str) -> None:
    """Dynamo chooses the host of the side channel, and its protocol by the connector's name."""
    port = free_port()
    made = made_by_dynamo(switch, port, secondary_tiers=TIERS)
    stock = "vllm.distributed.kv_transfer.kv_connector.v1.nixl."
    assert made["connector"].startswith("kvflow.vllm.named_nixl.NixlConnector" if switch == "1" else stock)
    assert made["listen"] == (f"tcp://{made['host']}:{port}" if switch == "1" else None)
    assert (made["params"]["do_remote_decode"], made["params"]["do_remote_prefill"]) == (True, False)
    assert made["hints"] == "tcp://10.0.0.7:5600"
