"""Real servers under everything at once: samples, rooms that are used twice, clients that leave, servers that stop.

Each answer is that of one server, or a typed failure; neither server ends, and each has all of its pages afterwards.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

import httpx

from tests.sglang.servers import Failed, Router, Server, Setup, prompt_of
from tests.sglang.test_pair import settle

PAUSE = threading.Event()
ANSWER_WITHIN_S = 200.0
"""Below SGLang's own patience of 300 s: nothing may be left to that."""
HEARTBEAT_S = 60.0
"""SGLang's heartbeat finds a server that stands still in some 16 s; on a busy machine it takes longer."""

Answers = list[list[int]]


@pytest.fixture(autouse=True)
def nothing_is_lost(router: Router) -> Iterator[None]:
    """Both servers go on after the test, and have all of their pages."""
    yield
    for server in (router.prefill, router.decode):
        assert server.process.poll() is None, server.said()[-3000:]
        settle(server, 120.0)
        assert server.healthy(), server.said()[-3000:]
        assert "leak" not in server.said()


def ask(server: Server, prompt: Sequence[int], n: int = 1, leave_s: float | None = None, **more: Any) -> Answers:
    """Answers of all samples. Failed if there is an error; TimeoutError for a client that has left."""
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True, "n": n}
    body = {"input_ids": list(prompt), "sampling_params": sampling, **more}
    try:
        found = httpx.post(f"{server.url}/generate", json=body, timeout=leave_s or ANSWER_WITHIN_S)
    except httpx.TimeoutException as left:
        assert leave_s is not None, f"{server.setup.mode}: no answer within {ANSWER_WITHIN_S} s"
        raise TimeoutError from left
    if found.status_code != 200:
        raise Failed(found.status_code, found.text)
    several = found.json() if isinstance(found.json(), list) else [found.json()]
    for one in several:
        reason = one["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise Failed(int(reason.get("status_code") or 500), str(reason.get("message")))
    return [one["output_ids"] for one in several]


def both(router: Router, prompt: Sequence[int], room: int, **more: Any) -> tuple[Future[Answers], Future[Answers]]:
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": router.prefill.bootstrap_port, "bootstrap_room": room}
    return tuple(  # type: ignore[return-value]
        router.pool.submit(ask, server, prompt, **where, **more) for server in (router.prefill, router.decode)
    )


def outcome(answer: Future[Answers]) -> Answers | str:
    """Answers, or the words of the failure."""
    try:
        return answer.result(ANSWER_WITHIN_S + 60)
    except (Failed, TimeoutError) as error:
        return str(error) or "left"


TYPED = ("kvflow: ", "Lost connection with prefill", "aborted", "Aborted", "has not answered", "left", "another rank")


def check(found: Answers | str, expected: list[int], n: int, what: str) -> bool:
    """The right answers, or a failure that says why. True if they are answers."""
    if isinstance(found, str):
        assert any(word in found for word in TYPED), f"{what}: {found}"
        return False
    assert found == [expected] * n, what
    return True


@pytest.mark.parametrize("n", [1, 2, 4])
def test_samples_of_one_prompt(router: Router, alone: Server, n: int) -> None:
    """SGLang gives all samples of a prompt one room, also the first sample, which fills its cache."""
    for length in (20, 300):
        prompt = prompt_of(length, seed=40 + n)
        prefilled, decoded = both(router, prompt, random.getrandbits(62) + 1, n=n)
        assert decoded.result(ANSWER_WITHIN_S) == [alone.generate(prompt, 6)] * n
        assert len(prefilled.result(ANSWER_WITHIN_S)) == n


def test_two_requests_of_one_room_at_once(router: Router, alone: Server) -> None:
    """A router that tries again: with the same prompt both are answered."""
    prompt = prompt_of(200, seed=51)
    asked = [both(router, prompt, 4712) for _ in range(2)]
    for _, decoded in asked:
        assert decoded.result(ANSWER_WITHIN_S) == [alone.generate(prompt, 6)]


def test_two_prompts_of_one_room_are_told_apart(router: Router, alone: Server) -> None:
    """Of one length: each decode request gets its own prompt's answer, or an error; and nothing wrong is kept."""
    prompts = [prompt_of(100, seed=52), prompt_of(100, seed=53)]
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": router.prefill.bootstrap_port, "bootstrap_room": 4713}
    prefilled = router.pool.submit(ask, router.prefill, prompts[0], **where)
    decoded = router.pool.submit(ask, router.decode, prompts[1], **where)
    for one in (prefilled, decoded):
        with pytest.raises(Failed, match="PromptMismatch"):
            one.result(ANSWER_WITHIN_S)
    for prompt in prompts:
        assert router.generate(prompt, 6) == alone.generate(prompt, 6)


@pytest.mark.parametrize("room", [0, 1 << 63, (1 << 63) + 5])
def test_a_room_that_cannot_be_fails_at_once(router: Router, room: int) -> None:
    for one in both(router, prompt_of(30, seed=54), room):
        with pytest.raises(Failed):
            one.result(60)


def test_decode_gives_up_before_prefill_has_heard(router: Router) -> None:
    """Its client leaves while the prefill server's request is still on its way: that one fails with decode's reason."""
    router.generate(prompt_of(20, seed=55))
    prompt, room = prompt_of(60, seed=56), random.getrandbits(62) + 1
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": router.prefill.bootstrap_port, "bootstrap_room": room}
    waiting = router.pool.submit(ask, router.decode, prompt, rid="leaves", **where)
    PAUSE.wait(0.5)
    router.decode.abort("leaves")
    with pytest.raises(Failed, match="borted"):
        waiting.result(60)
    with pytest.raises(Failed, match="the decode server has aborted the request"):
        router.pool.submit(ask, router.prefill, prompt, **where).result(60)


def mixed(router: Router, count: int, seed: int) -> list[tuple[Sequence[int], int, bool, Future[Answers]]]:
    """Requests of all kinds at once: prompt, samples, whether its client leaves, and decode's answer."""
    chosen, found = random.Random(seed), []
    for at in range(count):
        prompt, n = prompt_of(5 + 7 * (at % 40), seed=at), 1 + at % 4
        leave_s = chosen.uniform(0.02, 1.0) if at % 5 == 0 else None
        room = chosen.getrandbits(62) + 1
        times = 2 if at % 7 == 3 else 1
        for _ in range(times):
            found.append((prompt, n, leave_s is not None, both(router, prompt, room, n=n, leave_s=leave_s)[1]))
        if at % 11 == 5:
            other = prompt_of(len(prompt), seed=1000 + at)
            found.append((other, 1, True, both(router, other, room)[1]))  # a mix-up that may end both
    return found


def test_100_mixed_requests_with_20_leavers(router: Router, alone: Server) -> None:
    asked = mixed(router, 100, seed=1)
    answered = 0
    for at, (prompt, n, may_fail, decoded) in enumerate(asked):
        right = check(outcome(decoded), alone.generate(prompt, 6), n, f"request {at} of {len(prompt)} tokens")
        answered += right
        assert right or may_fail or "PromptMismatch" in outcome(decoded), f"request {at}: {outcome(decoded)}"
    print(f"{answered} of {len(asked)} answered")
    assert answered >= 70


def stop(server: Server, how: int) -> None:
    os.killpg(server.process.pid, how)


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.7])
def test_prefill_stands_still_and_goes_on(router: Router, alone: Server, after_s: float) -> None:
    """At some moment of 24 requests: decode's clients get errors within the heartbeat's time, and all goes on later."""
    asked = mixed(router, 24, seed=int(after_s * 100))
    PAUSE.wait(after_s)
    stop(router.prefill, signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        found = [outcome(decoded) for *_, decoded in asked]
        took_s = time.monotonic() - stopped_s
    finally:
        stop(router.prefill, signal.SIGCONT)
    print(f"all of {len(asked)} told {took_s:.1f} s after the prefill server stood still")
    assert took_s < HEARTBEAT_S
    for at, (prompt, n, _, _) in enumerate(asked):
        check(found[at], alone.generate(prompt, 6), n, f"request {at}")
    prompt = prompt_of(77, seed=60)
    deadline_s = time.monotonic() + 120
    while True:
        with suppress(Failed):
            assert router.generate(prompt, 6) == alone.generate(prompt, 6)
            break
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("after_s", [0.1, 0.5])
def test_prefill_is_killed_among_many(router: Router, alone: Server, site: Any, after_s: float) -> None:
    asked = mixed(router, 24, seed=int(after_s * 100) + 7)
    PAUSE.wait(after_s)
    router.prefill.kill()
    killed_s = time.monotonic()
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: outcome(one[3]), asked))
    took_s = time.monotonic() - killed_s
    print(f"all of {len(asked)} told {took_s:.1f} s after the prefill server was killed")
    assert took_s < HEARTBEAT_S
    for at, (prompt, n, _, _) in enumerate(asked):
        check(found[at], alone.generate(prompt, 6), n, f"request {at}")
    setup: Setup = router.prefill.setup
    (router.prefill,) = site.have(setup)
    prompt = prompt_of(78, seed=61)
    deadline_s = time.monotonic() + 120
    while True:
        with suppress(Failed):
            assert router.generate(prompt, 6) == alone.generate(prompt, 6)
            break
        assert time.monotonic() < deadline_s
