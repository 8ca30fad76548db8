"""Real servers of unequal tensor parallelism: the tokens are those of one server."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

from tests.sglang.conftest import ALONE
from tests.sglang.servers import Failed, Router, Setup, prompt_of
from tests.sglang.test_mixed import ANSWER_WITHIN_S, both
from tests.sglang.test_pair import settle


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_tensor_parallelism_of_real_servers(site: Any, prefill_tp: int, decode_tp: int) -> None:
    """Also of samples, of a client that leaves, and of two prompts of one room."""
    sizes = {"prefill": prefill_tp, "decode": decode_tp}
    # SGLang wants to be told which cores are whose, where there are more ranks than NUMA nodes.
    cores = {1: (), 2: (("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),)}
    setups = [
        Setup(mode=mode, options=("--tp-size", str(size)), environment=cores[size]) for mode, size in sizes.items()
    ]
    prefill, decode, alone = site.have(*setups, ALONE)
    router = Router(prefill, decode)
    for length in (1, 16, 17, 129, 300):
        prompt = prompt_of(length, seed=70)
        assert router.generate(prompt, 6) == alone.generate(prompt, 6), f"{length} tokens"
    prompt = prompt_of(120, seed=71)
    asked = [both(router, prompt, random.getrandbits(62) + 1, n=n)[1] for n in (1, 2, 3)]
    for n, decoded in enumerate(asked, 1):
        assert decoded.result(ANSWER_WITHIN_S) == [alone.generate(prompt, 6)] * n
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 4714}
    pair = zip((prefill, decode), (prompt_of(60, seed=72), prompt_of(60, seed=73)), strict=True)
    for answer in [router.pool.submit(server.generate, prompt, 6, **where) for server, prompt in pair]:
        with pytest.raises(Failed, match=r"PromptMismatch|another rank"):
            answer.result(ANSWER_WITHIN_S)
    assert router.generate(prompt, 6) == alone.generate(prompt, 6)
    router.close()
    for server in (prefill, decode):
        settle(server)
        assert server.healthy(), server.said()[-3000:]
        assert "leak" not in server.said()
