"""A prefill server of two dies in the middle of many requests: every one is answered, with the text of one server."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.vllm.conftest import DECODE, PREFILL, Site
from tests.vllm.servers import NAME, ROUTER, Server, proxied
from tests.vllm.test_failures import until_free

ALONE = {"cache_salt": "alone"}
FAILED, DONE = "vllm:kvflow_load_failures_total", "vllm:request_success_total"
REQUESTS = 50
SPARE = replace(PREFILL, role="kv_both", core=1)


@pytest.fixture
def servers(site: Site) -> tuple[Server, Server, Server]:
    doomed, spare, decode = site.have(PREFILL, SPARE, DECODE)
    return doomed, spare, decode


@pytest.mark.parametrize("copies", [1, 2], ids=["once more, elsewhere", "by both from the start"])
def test_a_prefill_server_is_killed_in_the_middle_of_50_requests(
    servers: tuple[Server, Server, Server], story: list[int], copies: int
) -> None:
    """Prompts are computed once more where decode has failed, or by two engines at once. When one dies it has computed
    some that decode has not read yet: its worker stands still until then.
    """
    doomed, spare, decode = servers
    prompts = [story[31 * nth : 31 * nth + 150 + 5 * nth] for nth in range(REQUESTS)]
    expected = [decode.text(prompt, 8, **ALONE) for prompt in prompts]
    failed, computed = decode.metric(FAILED), doomed.metric(DONE)
    frozen = decode.worker()

    def answer(nth: int) -> str:
        body = {"model": NAME, "prompt": prompts[nth], "max_tokens": 8, "temperature": 0, "cache_salt": f"{copies}"}
        answered = router.post("/v1/completions", json=body)
        assert answered.status_code == 200, answered.text
        text: str = answered.json()["choices"][0]["text"]
        return text

    with (
        proxied([doomed, spare], decode, router=ROUTER, options=("--copies", str(copies))) as router,
        ThreadPoolExecutor(REQUESTS) as clients,
    ):
        frozen.send_signal(signal.SIGSTOP)
        try:
            answers = [clients.submit(answer, nth) for nth in range(REQUESTS)]
            doomed.wait_metric(DONE, computed + 10)
            assert not any(one.done() for one in answers)
            doomed.kill()
        finally:
            frozen.send_signal(signal.SIGCONT)
        assert [one.result() for one in answers] == expected
    if copies == 1:
        decode.wait_metric(FAILED, failed + 1)
    else:
        assert decode.metric(FAILED) == failed
        assert "so the next one is read" in decode.log.read_text(errors="replace")
    for server in (spare, decode):
        until_free(server)
