"""Two real SGLang servers, prefill and decode: the tokens are those of one server, whatever else happens.

SGLang checks its own pools whenever it is idle, and a server that has lost a page ends: each test asks that both live.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

from tests.sglang.servers import PAGE, Failed, Router, Server, Setup, prompt_of

PAUSE = threading.Event()


@pytest.fixture(autouse=True)
def nothing_is_lost(router: Router) -> Iterator[None]:
    """Both go on after the test, and have all of their pages."""
    yield
    for server in (router.prefill, router.decode):
        if server.process.poll() is None:
            settle(server)
            assert server.healthy(), server.said()[-3000:]
            assert "leak" not in server.said()


def settle(server: Server, within_s: float = 60.0) -> None:
    """It is idle, and no page is anybody's but its prefix cache's."""
    deadline_s = time.monotonic() + within_s
    while any(load[name] for load in loads_of(server) for name in ("num_running_reqs", "num_used_tokens")):
        assert time.monotonic() < deadline_s, f"it does not come to rest:\n{server.said()[-3000:]}"
        PAUSE.wait(0.1)


def loads_of(server: Server) -> list[dict[str, Any]]:
    answer = server.client.get(f"{server.url}/v1/loads").json()
    found: list[dict[str, Any]] = answer["loads"]
    return found


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 300, 1500])
def test_tokens_are_those_of_one_server(router: Router, alone: Server, length: int) -> None:
    """Around the edges of pages (16) and of chunks (128)."""
    prompt = prompt_of(length)
    assert router.generate(prompt) == alone.generate(prompt)


def test_logprobs_come_with_the_first_token(router: Router, alone: Server) -> None:
    prompt = prompt_of(50, seed=1)
    assert router.generate(prompt, return_logprob=True) == alone.generate(prompt)


def test_idle_servers_do_no_more_than_one_server(router: Router, alone: Server) -> None:
    """No thread of the backend spins: CPU time of the schedulers, over the same ten seconds."""
    servers = (router.prefill, router.decode, alone)
    for server in servers:
        settle(server)
    before = [server.cpu_s() for server in servers]
    PAUSE.wait(10)
    prefill_s, decode_s, alone_s = (server.cpu_s() - one for server, one in zip(servers, before, strict=True))
    print(f"CPU in 10 s of idling: prefill {prefill_s:.2f} s, decode {decode_s:.2f} s, one server {alone_s:.2f} s")
    assert max(prefill_s, decode_s) < alone_s + 0.5


@pytest.mark.parametrize("kept", [16, 64, 200])
def test_prefixes_that_either_side_has(router: Router, alone: Server, kept: int) -> None:
    """Both keep their prefixes: the second prompt shares its beginning, the third is the first."""
    first = prompt_of(250, seed=kept)
    second = first[:kept] + prompt_of(60, seed=kept)
    for prompt in (first, second, first):
        assert router.generate(prompt) == alone.generate(prompt)


def test_a_room_is_used_twice(router: Router, alone: Server) -> None:
    for seed in (2, 3):
        prompt = prompt_of(40, seed=seed)
        assert router.generate(prompt, room=4711) == alone.generate(prompt)


def test_32_requests_at_once(router: Router, alone: Server) -> None:
    prompts = [prompt_of(10 + 9 * at, seed=at) for at in range(32)]
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda prompt: router.generate(prompt, 8), prompts))
    assert found == [alone.generate(prompt, 8) for prompt in prompts]


def test_clients_that_leave(router: Router, alone: Server) -> None:
    """100 mixed requests; 20 are aborted on both servers at any moment."""
    prompts = [prompt_of(5 + 7 * (at % 40), seed=at) for at in range(100)]

    def ask(at: int) -> list[int] | None:
        rid = f"request-{at:03d}"  # SGLang aborts whatever begins with it
        if at % 5 == 0:
            threading.Timer(0.02 * (at % 17), lambda: [s.abort(rid) for s in (router.prefill, router.decode)]).start()
        with suppress(Failed):
            return router.generate(prompts[at], 6, rid=rid)
        return None

    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(ask, range(100)))
    for at in range(0, 100):
        if at % 5:
            assert found[at] == alone.generate(prompts[at], 6), f"request {at}"


def test_a_prefill_server_that_is_killed_and_its_successor(router: Router, alone: Server, site: Any) -> None:
    """In the middle of a prompt, and before decode knows another server: decode's requests fail within 2 s.

    Decode then goes on with the next server.
    """
    router.generate(prompt_of(20, seed=8))
    before = router.prefill.said().count("Prefill batch")
    alone_there = {"bootstrap_host": "127.0.0.1", "bootstrap_port": router.prefill.bootstrap_port, "bootstrap_room": 88}
    waiting = router.pool.submit(router.decode.generate, prompt_of(30, seed=7), 8, **alone_there)
    _, decoded = router.both(prompt_of(1800, seed=9), 8)
    deadline_s = time.monotonic() + 60
    while router.prefill.said().count("Prefill batch") == before:
        assert time.monotonic() < deadline_s
        PAUSE.wait(0.01)
    killed_s = time.monotonic()
    router.prefill.kill()
    for name, answer in {"read": decoded, "waited for": waiting}.items():
        with pytest.raises(Failed) as caught:
            answer.result(100)
        after_s = time.monotonic() - killed_s
        print(f"{name}: decode's request failed {after_s:.2f} s after the prefill server was killed: {caught.value}")
        assert after_s < 2.0
    settle(router.decode)
    setup: Setup = router.prefill.setup
    (router.prefill,) = site.have(setup)
    prompt = prompt_of(70, seed=10)
    with suppress(Failed):  # the first one may still be told of the ranks before
        router.generate(prompt)
    assert router.generate(prompt) == alone.generate(prompt)


def test_requests_that_are_retracted(router: Router, alone: Server, site: Any) -> None:
    """The decode server's cache is too small for all answers: it puts some aside, and computes them later."""
    setup = Setup(mode="decode", tokens=1024)
    (router.decode,) = site.have(setup)
    prompts = [prompt_of(6 * PAGE, seed=20 + at) for at in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: router.generate(prompt, 60), prompts))
    assert "retract" in router.decode.said().lower()
    assert found == [alone.generate(prompt, 60) for prompt in prompts]


def test_a_prompt_that_prefill_refuses_fails_at_once(router: Router, site: Any) -> None:
    """The prefill server's cache is too small for it, so its scheduler refuses it; the decode server would take it."""
    (router.prefill,) = site.have(Setup(mode="prefill", tokens=512))
    with suppress(Failed):  # the decode server may have been told of the ranks before
        router.generate(prompt_of(20, seed=4))
    assert len(router.generate(prompt_of(20, seed=5), 8)) == 8
    began_s = time.monotonic()
    prefilled, decoded = router.both(prompt_of(900, seed=6), 8)
    with pytest.raises(Failed, match="exceeds"):
        prefilled.result(100)
    with pytest.raises(Failed, match="PrefillFailed"):
        decoded.result(100)
    assert time.monotonic() - began_s < 20, "not after 300 s, which is SGLang's own patience"
