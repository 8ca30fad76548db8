"""The compatibility hash: one digest of what two stock engines compare before they believe anything else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from kvflow.stock.versions import line_of

HASH = re.compile("[0-9a-f]{64}")

Factor = str | int | bool | None | Mapping[str, object]


def compatibility_hash(factors: Mapping[str, Factor]) -> str:
    """The hash that an engine of these factors shows; `vllm_version` is among them, and says which the others are.

    ValueError names factors that its line does not know, or that are missing.
    """
    version = factors.get("vllm_version")
    if not isinstance(version, str):
        raise ValueError(f"vllm_version: expected a text, got {type(version).__name__}")
    line = line_of(version)
    given = {"nixl_connector_version": line.protocol, **factors}
    odd = sorted(given.keys() ^ set(line.factors))
    if odd:
        raise ValueError(f"vLLM {line.version}: its hash is of {', '.join(line.factors)}; wrong or missing: {odd}")
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode(), usedforsecurity=False).hexdigest()
