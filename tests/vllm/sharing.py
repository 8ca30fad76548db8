"""Set-ups of a prefill server that reads prefixes from its decode server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.ports import free_port
from tests.vllm.servers import MODELS, NAME, Setup
from tests.vllm.test_models import BLOCK_SIZE, OPTIONS, TP2
from tests.vllm.test_prefix import PATIENT

PORT = free_port()
"""At which the decode server answers questions for prefixes."""
_EXTRA: dict[str, Any] = {"model": NAME, **dict(PATIENT), "prefix_tokens_min": BLOCK_SIZE}
PREFILL = Setup(
    role="kv_both",
    core=0,
    model=MODELS / "full",
    options=OPTIONS,
    policy="recompute",
    extra=tuple({**_EXTRA, "prefix_peers": [f"tcp://127.0.0.1:{PORT}"]}.items()),
)
DECODE = Setup(
    role="kv_consumer",
    core=1,
    model=MODELS / "full",
    options=OPTIONS,
    extra=tuple({**_EXTRA, "share_prefixes": True, "listen": f"tcp://127.0.0.1:{PORT}"}.items()),
)


def sharing_pair(model: str, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> tuple[Setup, Setup]:
    """Return both set-ups with a tiny model, and more options of each server."""

    def of(setup: Setup, options: tuple[str, ...]) -> Setup:
        core = "0|1" if TP2[0] in options else setup.core
        return replace(setup, model=MODELS / model, options=(*OPTIONS, *options), core=core)

    return of(PREFILL, prefill), of(DECODE, decode)
