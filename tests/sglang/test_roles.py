"""Two real SGLang servers change places while they run: prefill becomes decode and back, without a restart."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

from tests.sglang.conftest import ALONE, Site
from tests.sglang.servers import Router, Server, Setup, prompt_of
from tests.sglang.test_pair import settle

SWITCHED = (
    *("--enable-pd-role-switch", "--disaggregation-decode-enable-radix-cache"),
    # A server that begins as prefill will decode, too: its default takes pinned memory, which only CUDA has.
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
LENGTHS = (1, 16, 17, 128, 129, 300)
ROUNDS, CLIENTS = 4, 4


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    running = [Server.start(Setup(mode=mode, options=SWITCHED)) for mode in ("prefill", "decode")]
    try:
        for server in running:
            server.wait_up()
        yield running
    finally:
        for server in running:
            server.stop()


def become(server: Server, role: str) -> None:
    """As an operator's controller does, once the server is idle. No graphs are captured on a CPU."""
    settle(server)
    wanted = {"new_role": role, "decode_cuda_graph_memory_gb": 0.0}
    answer = server.client.post(f"{server.url}/pd_role_switch", json=wanted)
    assert answer.status_code == 200, f"{answer.text}\n{server.said()[-3000:]}"


@pytest.mark.timeout(2400)
def test_prefill_becomes_decode_and_back_and_every_answer_is_that_of_one_server(
    servers: list[Server], site: Site
) -> None:
    (alone,) = site.have(ALONE)
    for nth in range(ROUNDS):
        prefill, decode = servers if nth % 2 == 0 else servers[::-1]
        if nth:
            become(decode, "decode")
            become(prefill, "prefill")
        router = Router(prefill, decode)
        prompts = [prompt_of(length, seed=seed) for length in LENGTHS for seed in (nth, "every round")]
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = list(clients.map(router.generate, prompts))
        router.close()
        assert answers == [alone.generate(prompt) for prompt in prompts], f"round {nth}"
    for server in servers:
        settle(server)
        assert server.healthy(), server.said()[-3000:]
        assert "leak" not in server.said()
