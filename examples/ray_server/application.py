"""The three deployments as one application, which service.yaml names as `ray_server.application:build`."""

from __future__ import annotations

import os
from typing import Any

from ray.serve import Application

from ray_server.decode import Decode
from ray_server.ingress import Ingress
from ray_server.prefill import Prefill

DEADLINE_S = 60.0
CHECKPOINT = "KVFLOW_RAY_MODEL"


def build(arguments: dict[str, Any]) -> Application:
    """Build the application from the `args` of its config.

    `checkpoint` is the folder of the unpacked model on every node, by default the value of KVFLOW_RAY_MODEL.
    `deadline_s` is the maximum time of an answer. With `share_prefixes` prefill replicas load prefixes from each other.
    """
    checkpoint = arguments.get("checkpoint") or os.environ.get(CHECKPOINT)
    if not checkpoint:
        raise ValueError(f"args: checkpoint: expected the folder of an unpacked model, and {CHECKPOINT} is not set")
    deadline_s = float(arguments.get("deadline_s", DEADLINE_S))
    share = arguments.get("share_prefixes", False)
    if not isinstance(share, bool):
        raise ValueError(f"args: share_prefixes: expected true or false, got {share!r}")
    ingress: Any = Ingress  # Ray's decorator makes these classes deployments
    decode: Any = Decode
    prefill: Any = Prefill
    return ingress.bind(decode.bind(prefill.bind(checkpoint, share), checkpoint), checkpoint, deadline_s)
