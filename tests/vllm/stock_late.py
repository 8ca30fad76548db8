"""Parameters of a stock producer that are used too late: what comes of it with kvflow as the reader, and with stock.

    .venv-vllm/bin/python tests/vllm/stock_late.py [--tries 200] [--reader kvflow|stock] [--router-late]

Requests wait at the decode engine, behind one that it computes, when all its processes are frozen, as by a host that
pages or a machine that is moved. The producer's leases run out, it gives the blocks to other prompts, and the reader
wakes up. An answer is right, wrong, or refused. With `--router-late` the parameters lie at the router meanwhile and
the reader is never frozen: a reader cannot see that, see docs/stock.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.vllm.servers import ROOT, HTTPFailed, Server, Setup, prefill

LEASE_S = 5
AT_ONCE = 40
TOKENS, ANSWER = 100, 8  # a prompt is less than a block
PRODUCER_BLOCKS, OTHER_TOKENS = 48, 600
STOCK = (("kv_connector", "NixlConnector"),)
TERMS = {"lease_s": LEASE_S, "router_s": 2}
OURS = (("model", "smollm2"), ("stock_peers", True), ("stock", TERMS))
ONE_AT_A_TIME = ("--max-num-seqs", "1")


def late_setups(consumer: Setup, lease_s: int) -> tuple[Setup, Setup]:
    """A stock producer with few blocks, and a consumer that computes one request at a time."""
    ports = (("VLLM_NIXL_SIDE_CHANNEL_PORT", "26600"), ("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"))
    extra = (("kv_lease_duration", lease_s),)
    producer = Setup(
        role="kv_producer", core=0, connector=STOCK, extra=extra, blocks=PRODUCER_BLOCKS, environment=ports
    )
    return producer, replace(consumer, options=ONE_AT_A_TIME)


def late_round(
    producer: Server,
    consumer: Server,
    story: Sequence[int],
    turn: int,
    lease_s: float,
    at_once: int = AT_ONCE,
    *,
    router_late: bool = False,
) -> Counter[str]:
    """So many requests that are late: how many answers were right, wrong, refused."""
    prompts = [list(story[start : start + TOKENS]) for start in range(0, 40 * at_once, 40)]
    expected = [producer.text(prompt, ANSWER, cache_salt="alone") for prompt in prompts]

    def ask(prompt: list[int], params: dict[str, object], right: str) -> str:
        salt = f"{turn} {params['remote_request_id']}"  # what a wrong answer leaves in its prefix cache is not ours
        try:
            found = consumer.text(prompt, ANSWER, kv_transfer_params=params, cache_salt=salt)
        except HTTPFailed:
            return "refused"
        return "right" if found == right else "wrong"

    with ThreadPoolExecutor(at_once + 1) as clients:
        params = [prefill(producer, prompt) for prompt in prompts]
        if router_late:
            _pass(producer, story, lease_s)
            return Counter(clients.map(ask, prompts, params, expected))
        busy = clients.submit(consumer.text, story[-300:], 100, ignore_eos=True, cache_salt=str(turn))
        consumer.wait_metric("vllm:num_requests_running", 1)
        answers = [clients.submit(ask, *one) for one in zip(prompts, params, expected, strict=True)]
        consumer.wait_metric("vllm:num_requests_waiting", at_once)
        consumer.signal(signal.SIGSTOP)
        try:
            _pass(producer, story, lease_s)
        finally:
            consumer.signal(signal.SIGCONT)
        busy.result()
        return Counter(answer.result() for answer in answers)


def _pass(producer: Server, story: Sequence[int], lease_s: float) -> None:
    """Let the leases run out, and every block of the producer go to another prompt."""
    time.sleep(lease_s + 2)
    for start in range(0, 128 * PRODUCER_BLOCKS, OTHER_TOKENS):
        begin = 700 + start // 8
        producer.text(story[begin : begin + OTHER_TOKENS], 1, cache_salt=f"others {start} {time.monotonic()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--reader", choices=["kvflow", "stock"])
    parser.add_argument("--router-late", action="store_true")
    options = parser.parse_args()
    ports = (("VLLM_NIXL_SIDE_CHANNEL_PORT", "26700"),)
    readers = {
        "kvflow": Setup(role="kv_consumer", core=1, extra=OURS),
        "stock": Setup(role="kv_consumer", core=1, connector=STOCK, environment=ports),
    }
    for name in [options.reader] if options.reader else readers:
        servers = [Server.start(setup) for setup in late_setups(readers[name], LEASE_S)]
        try:
            for server in servers:
                server.wait_up()
            story = servers[1].tokens((ROOT / "docs" / "architecture.md").read_text())
            total: Counter[str] = Counter()
            at_once = min(AT_ONCE, options.tries)
            for turn in range(-(-options.tries // at_once)):
                total += late_round(*servers, story, turn, LEASE_S, at_once, router_late=options.router_late)
                print(f"{name} reads stock, late: {dict(total)}", flush=True)
            assert servers[0].healthy()
            assert servers[1].healthy()
        finally:
            for server in servers:
                if server.alive:
                    server.kill()


if __name__ == "__main__":
    main()
