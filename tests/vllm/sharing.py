"""Set-ups of a prefill server that reads prefixes from its decode server."""

from __future__ import annotations

from typing import Any

from tests.support.ports import free_port
from tests.vllm.servers import MODELS, NAME, Setup
from tests.vllm.test_models import BLOCK_SIZE, OPTIONS
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
