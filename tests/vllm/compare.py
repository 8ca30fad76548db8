"""kvflow's connector against vLLM's own NixlConnector: the same prompts, interleaved, on one machine.

Both pairs of servers run, and take turns: while one answers the other is stopped (SIGSTOP), since vLLM's connector
keeps two cores busy when it is idle. Run it in the environment of `python3 dev.py vllm`, on a machine that does
nothing else:

    .venv-vllm/bin/python tests/vllm/compare.py [--rounds 5] [--idle-s 10]
        [--only speed|idle|stale|models|first|cold|flow|stock|versions|prefix|leg|cached]

`stock` has stock producers, read by kvflow (mixed) and by stock (nixl). `versions` has kvflow in two versions of vLLM.
`leg` shows where decode's time to the first token goes, beside a NixlConnector whose progress thread does not spin;
all four servers are alive. `cached` is of prompts that prefill's cache has in part.
`models`, `first` and `cold` start each pair of servers by itself. `cold` tells the first hand-over's loads from the
decode engine's own first step. `models` is no measurement, and takes an hour. `flow` is of prompts that are read while
they are computed, `prefix` of prefixes pulled from a neighbour's cache, and neither is part of the rest:

    .venv-vllm/bin/python tests/vllm/compare.py --only flow --rounds 15
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvflow import Ticket
from tests.support.ports import free_port
from tests.vllm import stamps
from tests.vllm.servers import (
    INSTALLED,
    KVFLOW,
    NAME,
    NEWER,
    ROOT,
    VERSION,
    HTTPFailed,
    Server,
    Setup,
    hand_over_ids,
    introduction_of,
    prefill,
    rendezvous,
)
from tests.vllm.test_models import EXTERNAL, ROWS, assert_same, is_exact, prompt_of
from tests.vllm.test_models import LENGTHS as MODEL_LENGTHS

LENGTHS = (100, 400, 1000, 1900)
TOKENS = 16
CONNECTORS = {"kvflow": tuple(KVFLOW.items()), "nixl": (("kv_connector", "NixlConnector"),)}
FAIR = "fair nixl"  # does not spin
FAIR_NIXL = (("kv_connector", "FairNixlConnector"), ("kv_connector_module_path", "tests.vllm.fair_nixl"))
LEG_PROMPT = 1900
MIXED = "mixed"  # kvflow reads from a stock producer
LEASE_S = 5
STALE_PROMPT, STALE_BLOCKS, OTHERS = 417, 24, 8
CACHED_SHARES = (0.0, 0.5, 0.9)
FLOW_PROMPT, FLOW_CHUNK, FLOW_TOKENS = 1900, 256, 4
PREFIX, TAIL = 1500, 20
COLD_PROMPT = 300


@dataclass(frozen=True)
class Pair:
    name: str
    producer: Server
    consumer: Server

    @classmethod
    def start(
        cls,
        name: str,
        reader: str = "",
        *,
        blocks: int | None = None,
        lease_s: int | None = None,
        port: int = 18600,
        options: tuple[str, ...] = (),
        version: str = "",
        environment: tuple[tuple[str, str], ...] = (),
    ) -> Pair:
        """Servers with these connectors, the same on both sides if `reader` is not named; on ports from `port` on.

        `version` is vLLM's, if it is not the tested one, and then the pair's name.
        """
        sides = enumerate((("producer", name), ("consumer", reader or name)))
        setups = (setup_of(made, role, core, blocks=blocks, lease_s=lease_s, port=port) for core, (role, made) in sides)
        setups = (
            replace(
                setup,
                options=options,
                version=version or VERSION,
                environment=(*setup.environment, *environment),
            )
            for setup in setups
        )
        return cls(version or reader or name, *map(Server.start, setups))

    def wait_up(self) -> None:
        self.producer.wait_up()
        self.consumer.wait_up()

    def signal(self, what: signal.Signals) -> None:
        self.producer.signal(what)
        self.consumer.signal(what)

    def kill(self) -> None:
        self.producer.kill()
        self.consumer.kill()

    @contextmanager
    def awake(self) -> Iterator[None]:
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)


def setup_of(
    name: str, role: str, core: int, *, blocks: int | None = None, lease_s: int | None = None, port: int = 0
) -> Setup:
    """Return how a server of the contender `name` is started; `port` is the first that its connector listens on."""
    extra = {"kvflow": {"model": NAME}, MIXED: {"model": NAME, "stock_peers": True}, "nixl": {}, FAIR: {}}[name]
    if lease_s is not None:
        extra[{"kvflow": "lease_ttl_s", "nixl": "kv_lease_duration"}[name]] = lease_s
    return Setup(
        role=f"kv_{role}",
        core=core,
        connector={**CONNECTORS, MIXED: CONNECTORS["kvflow"], FAIR: FAIR_NIXL}[name],
        extra=tuple(extra.items()),
        blocks=blocks,
        environment=(("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port + 10 * core)),),
    )


@dataclass(frozen=True)
class Sample:
    """Seconds of one hand-over: decode's first token, the whole request at decode, both sides together."""

    first_s: float
    decode_s: float
    total_s: float
    text: str


def sample(pair: Pair, prompt: Sequence[int]) -> Sample:
    began_s = time.perf_counter()
    params = prefill(pair.producer, prompt)
    asked_s = time.perf_counter()
    first_s, text = _streamed(pair.consumer, prompt, TOKENS, kv_transfer_params=params)
    ended_s = time.perf_counter()
    return Sample(first_s - asked_s, ended_s - asked_s, ended_s - began_s, text)


def _streamed(server: Server, prompt: Sequence[int], tokens: int, **more: Any) -> tuple[float, str]:
    """When the first token was here, and the text."""
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True, **more}
    first_s, text = 0.0, ""
    with server.client.stream("POST", f"http://127.0.0.1:{server.port}/v1/completions", json=body) as lines:
        if lines.status_code != 200:
            raise HTTPFailed(lines.status_code, lines.read().decode(errors="replace"))
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter()
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return first_s, text


def stock(rounds: int) -> None:
    """Stock producers, read by kvflow and by stock."""
    in_turns([partial(Pair.start, "nixl", reader) for reader in (MIXED, "nixl")], rounds)


def versions(rounds: int) -> None:
    """kvflow on both sides, in the installed vLLM and in the newest."""
    in_turns([partial(Pair.start, "kvflow", version=version) for version in (INSTALLED, NEWER)], rounds)


def leg(rounds: int) -> None:
    """Where decode's time to the first token goes, call by call; the pairs take turns, request by request."""
    pairs: list[tuple[Pair, Path]] = []
    spans: dict[str, list[dict[str, float]]] = {}
    try:
        for port, name in ((18600, "kvflow"), (18640, FAIR)):
            stamps_file = Path(tempfile.mkstemp(prefix="kvflow-stamps-")[1])
            pair = Pair.start(name, port=port, environment=((stamps.VARIABLE, str(stamps_file)),))
            pairs.append((pair, stamps_file))
            pair.wait_up()
        story = _story(pairs[0][0])
        windows: dict[str, list[tuple[float, float]]] = {pair.name: [] for pair, _ in pairs}
        for turn in range(-3, rounds):
            prompt = story[7 + 11 * (turn + 3) :][:LEG_PROMPT]
            for pair, _ in pairs if turn % 2 else pairs[::-1]:
                params = prefill(pair.producer, prompt)
                asked_s = time.perf_counter()
                first_s, _ = _streamed(pair.consumer, prompt, 4, kv_transfer_params=params)
                if turn >= 0:  # the first rounds shake hands
                    windows[pair.name].append((asked_s, first_s))
        for pair, stamps_file in pairs:
            processes = {entry.pid for entry in pair.consumer.processes()}
            found = [stamp for stamp in stamps.read(stamps_file) if stamp.process in processes]
            spans[pair.name] = [stamps.leg_of(found, *window) for window in windows[pair.name]]
    finally:
        for pair, stamps_file in pairs:
            pair.kill()
            stamps_file.unlink()
    print(f"\nDecode's leg of {LEG_PROMPT} tokens, vLLM {VERSION}; ms: median (smallest to largest) of {rounds}")
    print(f"{'':44} " + " ".join(f"{name:>26}" for name in spans))
    for row in spans[FAIR][0]:
        cells = [
            _spread([span[row] / (1e3 if row == "steps" else 1) for span in entries]) for entries in spans.values()
        ]
        print(f"{row:44} " + " ".join(f"{cell:>26}" for cell in cells))
    ratios = [one["whole"] / other["whole"] for one, other in zip(*spans.values(), strict=True)]
    print(f"kvflow to {FAIR}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    half = (rounds + 1) // 2
    for what, some in (("first", slice(half)), ("last", slice(-half, None))):
        loads = ", ".join(
            f"{name} {_spread([span['load'] for span in entries[some]])}" for name, entries in spans.items()
        )
        print(f"{what} {half} rounds: {statistics.median(ratios[some]):.2f}; load in ms: {loads}")


def in_turns(starts: Sequence[Callable[..., Pair]], rounds: int) -> None:
    pairs: list[Pair] = []
    try:
        for port, start in zip((18600, 18640), starts, strict=True):
            pairs.append(start(port=port))
            pairs[-1].wait_up()
            story = _story(pairs[-1])
            pairs[-1].signal(signal.SIGSTOP)
        speed(pairs, story, rounds)
    finally:
        for pair in pairs:
            pair.kill()


def speed(pairs: Sequence[Pair], story: Sequence[int], rounds: int) -> None:
    found: dict[tuple[str, int], list[Sample]] = {}
    for turn in range(-1, rounds):
        for length in LENGTHS:
            start = 7 + 11 * (turn + 1)  # a prompt that no cache has a block of
            for pair in pairs if turn % 2 else tuple(reversed(pairs)):
                with pair.awake():
                    got = sample(pair, story[start : start + length])
                if turn >= 0:  # the first round shakes hands
                    found.setdefault((pair.name, length), []).append(got)
    texts_differ = sum(
        len({sample.text for sample in entries}) > 1
        for length in LENGTHS
        for entries in zip(*(found[pair.name, length] for pair in pairs), strict=True)
    )
    print(f"\nSpeed, ms: median (smallest to largest) of {rounds}; texts that differ: {texts_differ}")
    print(f"{'prompt':>7} {'':8} {'first token at decode':>28} {'all tokens at decode':>28} {'prefill and decode':>28}")
    for length in LENGTHS:
        for pair in pairs:
            entries = found[pair.name, length]
            columns = [[getattr(entry, field) for entry in entries] for field in ("first_s", "decode_s", "total_s")]
            print(f"{length:>7} {pair.name:8} " + " ".join(f"{_spread(column):>28}" for column in columns))


def _spread(seconds: Sequence[float]) -> str:
    low, middle, high = (1e3 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def idle(pairs: Sequence[Pair], seconds: float) -> None:
    print(f"\nIdle CPU, % of one core over {seconds:g} s: all processes of a server; its busiest thread")
    for pair in pairs:
        with pair.awake():
            time.sleep(2.0)
            before = {server: _threads(server) for server in (pair.producer, pair.consumer)}
            time.sleep(seconds)
            for server, was in before.items():
                spent = {key: value - was.get(key, 0.0) for key, value in _threads(server).items()}
                total, most = sum(spent.values()), max(spent.values())
                share = [f"{100 * value / seconds:6.1f}" for value in (total, most)]
                print(f"{pair.name:8} {server.setup.role:12} {share[0]} {share[1]}")


def _threads(server: Server) -> dict[tuple[int, int], float]:
    return {
        (process.pid, thread.id): thread.user_time + thread.system_time
        for process in server.processes()
        for thread in process.threads()
    }


def stale(name: str) -> None:
    """Parameters that are used when their lease is over and the blocks hold other prompts."""
    pair = Pair.start(name, blocks=STALE_BLOCKS, lease_s=LEASE_S)
    try:
        pair.wait_up()
        story = _story(pair)
        prompt = story[:STALE_PROMPT]
        expected = pair.producer.text(prompt, cache_salt="alone")
        params = prefill(pair.producer, prompt)
        time.sleep(LEASE_S + 3)
        for start in range(500, 500 + 100 * OTHERS, 100):
            pair.producer.text(story[start : start + 600], 1)
        try:
            late = pair.consumer.text(prompt, kv_transfer_params=params)
            answer = "the right text" if late == expected else "WRONG TEXT with HTTP 200"
        except HTTPFailed as error:
            answer = f"HTTP {error.status}"
        plain = pair.consumer.text(prompt)
        after = "right" if plain == expected else "WRONG: the prefix cache is poisoned"
        print(f"{name:8} late parameters: {answer}; the same prompt later, without parameters: {after}")
    finally:
        pair.kill()


def models() -> None:
    """Every kind of cache: whether the prompts have the tokens of one instance, and whether the servers live."""
    print(f"\n| row of tests/vllm/test_models.py | {' | '.join(CONNECTORS)} |\n|---|{'---|' * len(CONNECTORS)}")
    for row in ROWS:
        cells = [_judge_model(name, row) for name in CONNECTORS]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


@contextmanager
def _both(name: str, setups: tuple[Setup, Setup]) -> Iterator[tuple[Server, Server]]:
    """A row's servers with one of the connectors; AssertionError if they do not start."""
    servers: list[Server] = []
    try:
        for core, setup in enumerate(setups):
            if name == "kvflow":
                servers.append(Server.start(setup))
                continue
            ours = dict(CONNECTORS[name])
            multi = "connectors" in dict(setup.extra)
            theirs = replace(
                setup,
                connector=(("kv_connector", "MultiConnector"),) if multi else tuple(ours.items()),
                extra=(("connectors", [{**ours, "kv_role": setup.role}]),) if multi else (),
                environment=(*setup.environment, ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(18800 + 10 * core))),
            )
            servers.append(Server.start(theirs))
        for server in servers:
            server.wait_up()
        yield servers[0], servers[1]
    finally:
        for server in servers:
            if server.alive:
                server.kill()


def _judge_model(name: str, row: str) -> str:
    try:
        with _both(name, ROWS[row]) as (producer, consumer):
            found = [_same(producer, consumer, prompt_of(length), row) for length in MODEL_LENGTHS]
            counts = {answer: found.count(answer) for answer in dict.fromkeys(found)}
            answers = ", ".join(f"{count} {answer}" for answer, count in counts.items())
            received = consumer.metric(EXTERNAL, source="external_kv_transfer")
            alive = "" if producer.healthy() and consumer.healthy() else "; **an engine died**"
            return f"{answers} of {len(found)}, {received:.0f} tokens received{alive}"
    except AssertionError:
        return "does not start"
    except httpx.HTTPError:
        return "**an engine died**"


def _same(producer: Server, consumer: Server, prompt: Sequence[int], row: str) -> str:
    try:
        found = hand_over_ids(producer, consumer, prompt)
        return _judged(producer, prompt, found, row)
    except (HTTPFailed, httpx.HTTPError) as error:
        return f"HTTP {error.status}" if isinstance(error, HTTPFailed) else "lost"


def _judged(producer: Server, prompt: Sequence[int], found: list[int], row: str) -> str:
    try:
        assert_same(producer, list(prompt), found, is_exact(row))
    except AssertionError:
        return "**wrong**"
    return "equal"


def first(rounds: int) -> None:
    """How long the first hand-over between two new engines takes, of two ranks each, on cores that are busy already."""
    print(f"\nThe first hand-over, TP 2 to 2, beside a busy loop on each core: seconds at decode, of {rounds} starts")
    for name in CONNECTORS:
        found = []
        for turn in range(rounds):
            with _both(name, ROWS["TP 2 to 2"]) as (producer, consumer):
                loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
                try:
                    params = prefill(producer, prompt_of(300, seed=turn))
                    began_s = time.perf_counter()
                    consumer.ids(prompt_of(300, seed=turn), 1, kv_transfer_params=params)
                    found.append(f"{time.perf_counter() - began_s:.1f}")
                except (HTTPFailed, httpx.HTTPError) as error:
                    found.append(f"{type(error).__name__} after {time.perf_counter() - began_s:.1f}")
                finally:
                    for loop in loops:
                        loop.kill()
                        loop.wait()
        print(f"{name:8} {', '.join(found)}", flush=True)


def cold(rounds: int) -> None:
    """The first two hand-overs from one rank to two ranks, to a decode engine that is new or has computed a prompt."""
    print(f"\nHand-overs of {COLD_PROMPT} tokens, TP 1 to 2, ms to the first token at decode, of {rounds} starts")
    print("beside each the mean load of the two ranks, as kvflow's metrics have it")
    found: dict[tuple[bool, str], list[tuple[float, float]]] = {}
    for turn, computed_before in product(range(rounds), (False, True)):
        with _both("kvflow", ROWS["TP 1 to 2"]) as (producer, consumer):
            if computed_before:
                consumer.ids(prompt_of(COLD_PROMPT, seed=-1), 1)
            for nth, what in enumerate(("first", "second"), 1):
                prompt = prompt_of(COLD_PROMPT, seed=10 * turn + nth)
                params = prefill(producer, prompt)
                loads_before_s = consumer.metric("vllm:kvflow_load_seconds_sum")
                began_s = time.perf_counter()
                consumer.ids(prompt, 1, kv_transfer_params=params)
                first_s = time.perf_counter() - began_s
                consumer.wait_metric("vllm:kvflow_load_seconds_count", 2 * nth)
                load_s = (consumer.metric("vllm:kvflow_load_seconds_sum") - loads_before_s) / 2
                found.setdefault((computed_before, what), []).append((first_s, load_s))
    for (computed_before, what), pairs in found.items():
        engine = "that has computed a prompt" if computed_before else "that is new"
        whole_s, loads_s = zip(*pairs, strict=True)
        print(f"{what:6} hand-over, decode engine {engine:28} {_spread(whole_s):>28}, load {_spread(loads_s):>24}")


@dataclass(frozen=True)
class Flowed:
    """Seconds of one request: to decode's first token, from the moment it came and from the end of prefill."""

    first_s: float
    after_prefill_s: float
    text: str


def flow(rounds: int) -> None:
    """Decode's first token, from the moment in which the router has the request.

    A router that asks both sides at once, and one that asks them one after the other, of the same servers; and vLLM's
    own connector, which knows the second way only. Every sample has a prefix cache of its own.
    """
    options = ("--max-num-batched-tokens", str(FLOW_CHUNK))
    pairs: dict[str, Pair] = {}
    try:
        for name in CONNECTORS:
            pairs[name] = Pair.start(name, options=options)
            pairs[name].wait_up()
            story = _story(pairs[name])
            if name == "kvflow":
                introduction = introduction_of(pairs[name].producer, story)  # as of any earlier answer
            pairs[name].signal(signal.SIGSTOP)
        ways: dict[str, tuple[Pair, Callable[[Pair, Sequence[int], str], Flowed]]] = {
            "kvflow, both at once": (pairs["kvflow"], partial(_both_at_once, introduction)),
            "kvflow, one after the other": (pairs["kvflow"], _one_after_the_other),
            "nixl, one after the other": (pairs["nixl"], _one_after_the_other),
        }
        found: dict[str, list[Flowed]] = {name: [] for name in ways}
        for turn in range(-1, rounds):
            prompt = story[11 * (turn + 1) :][:FLOW_PROMPT]
            order = list(ways)[(turn + 1) % len(ways) :] + list(ways)[: (turn + 1) % len(ways)]
            for name in order:
                pair, ask = ways[name]
                with pair.awake():
                    got = ask(pair, prompt, f"{name} {turn}")
                if turn >= 0:  # the first round shakes hands
                    found[name].append(got)
        _print_flow(found, rounds)
    finally:
        for pair in pairs.values():
            pair.kill()


def cached(rounds: int) -> None:
    """Decode's first token, both legs at once and one after the other, of prompts that prefill's cache has in part."""
    pair = Pair.start("kvflow")
    found: dict[tuple[float, str], list[Flowed]] = {}
    try:
        pair.wait_up()
        story = _story(pair)
        introduction = introduction_of(pair.producer, story)
        ways = {"both at once": partial(_both_at_once, introduction), "one after the other": _one_after_the_other}
        for turn in range(-1, rounds):
            prompt = story[11 * (turn + 1) :][:FLOW_PROMPT]
            for share, name in product(CACHED_SHARES, sorted(ways, reverse=bool(turn % 2))):
                salt = f"{share} {name} {turn}"
                if share:
                    pair.producer.complete(prompt[: int(share * FLOW_PROMPT)], 1, cache_salt=salt)
                got = ways[name](pair, prompt, salt)
                if turn >= 0:  # the first round shakes hands
                    found.setdefault((share, name), []).append(got)
    finally:
        pair.kill()
    print(
        f"\n{FLOW_PROMPT} tokens, vLLM {VERSION}; first token at decode in ms: median (smallest to largest) of {rounds}"
    )
    for share in CACHED_SHARES:
        once, after = (found[share, name] for name in ("both at once", "one after the other"))
        ratios = [one.first_s / other.first_s for one, other in zip(once, after, strict=True)]
        differ = sum(one.text != other.text for one, other in zip(once, after, strict=True))
        cells = " ".join(f"{_spread([entry.first_s for entry in entries]):>28}" for entries in (once, after))
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{share:4.0%} cached: at once, one after the other {cells}; ratio {ratio}; texts that differ: {differ}")


def _one_after_the_other(pair: Pair, prompt: Sequence[int], salt: str) -> Flowed:
    began_s = time.perf_counter()
    params = prefill(pair.producer, prompt, cache_salt=salt)
    computed_s = time.perf_counter()
    first_s, text = _streamed(pair.consumer, prompt, FLOW_TOKENS, kv_transfer_params=params, cache_salt=salt)
    return Flowed(first_s - began_s, first_s - computed_s, text)


def _both_at_once(introduction: Ticket, pair: Pair, prompt: Sequence[int], salt: str) -> Flowed:
    began_s = time.perf_counter()
    to_compute, to_receive = rendezvous(introduction)

    def compute() -> float:
        pair.producer.complete(prompt, 1, kv_transfer_params=to_compute, cache_salt=salt)
        return time.perf_counter()

    with ThreadPoolExecutor(1) as other:
        computing = other.submit(compute)
        first_s, text = _streamed(pair.consumer, prompt, FLOW_TOKENS, kv_transfer_params=to_receive, cache_salt=salt)
        return Flowed(first_s - began_s, first_s - computing.result(), text)


def _print_flow(found: dict[str, list[Flowed]], rounds: int) -> None:
    differ = sum(len({entry.text for entry in entries}) > 1 for entries in zip(*found.values(), strict=True))
    print(f"\n{FLOW_PROMPT} tokens, computed in chunks of {FLOW_CHUNK}; ms: median (smallest to largest) of {rounds}")
    print(f"texts that differ: {differ}. The ratio is the median of each round's to the last row's.")
    print(f"{'':28} {'first token at decode':>30} {'ratio':>22} {'after prefill has answered':>30}")
    base = list(found.values())[-1]
    for name, entries in found.items():
        ratios = [entry.first_s / other.first_s for entry, other in zip(entries, base, strict=True)]
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        first_s = _spread([entry.first_s for entry in entries])
        after_s = _spread([entry.after_prefill_s for entry in entries])
        print(f"{name:28} {first_s:>30} {ratio:>22} {after_s:>30}")


def prefix(rounds: int) -> None:
    """First token of a prompt, with a beginning pulled from a neighbour, and with the whole prompt computed.

    The same server does both and asks its neighbour for both; the neighbour has nothing of the second prompt.
    """
    holder = replace(setup_of("kvflow", "producer", 0), extra=(("model", NAME), ("share_prefixes", True)))
    port = free_port()
    holder = replace(holder, extra=(*holder.extra, ("listen", f"tcp://127.0.0.1:{port}")))
    peers = ("prefix_peers", [f"tcp://127.0.0.1:{port}"])
    reader = replace(setup_of("kvflow", "consumer", 1), extra=(("model", NAME), peers), policy="recompute")
    pair = Pair("kvflow", *(Server.start(setup) for setup in (holder, reader)))
    found: dict[str, list[tuple[float, str]]] = {"pulled": [], "computed": []}
    try:
        pair.wait_up()
        story = _story(pair)
        for turn in range(-2, rounds):
            begin = 11 * (turn + 2)
            prompt, other = story[begin : begin + PREFIX + TAIL], story[begin : begin + PREFIX]
            pair.producer.complete([*other, *reversed(other[:TAIL])], 1, cache_salt=f"pulled {turn}")
            for way in sorted(found, reverse=bool(turn % 2)):
                began_s = time.perf_counter()
                first_s, text = _streamed(pair.consumer, prompt, FLOW_TOKENS, cache_salt=f"{way} {turn}")
                if turn >= 0:  # the first rounds shake hands
                    found[way].append((first_s - began_s, text))
        pair.consumer.complete(story[:10], 1)
        pulled = pair.consumer.metric("vllm:kvflow_prefix_questions_total", outcome="found")
    finally:
        pair.kill()
    seconds = {way: [entry[0] for entry in entries] for way, entries in found.items()}
    ratios = [one / other for one, other in zip(seconds["pulled"], seconds["computed"], strict=True)]
    differ = sum(one[1] != other[1] for one, other in zip(*found.values(), strict=True))
    print(f"\n{PREFIX} tokens that a neighbour has, and {TAIL} more; first token in ms: median (smallest to largest)")
    print(f"prefixes found: {pulled:.0f} of {rounds + 2}; texts that differ: {differ}")
    for way, values in seconds.items():
        print(f"{way:28} {_spread(values):>30}")
    print(f"{'ratio':28} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def _story(pair: Pair) -> list[int]:
    return pair.consumer.tokens((ROOT / "docs" / "architecture.md").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=10.0)
    alone = {
        "first": first,
        "cold": cold,
        "flow": flow,
        "stock": stock,
        "versions": versions,
        "prefix": prefix,
        "leg": leg,
        "cached": cached,
    }
    parser.add_argument("--only", choices=["speed", "idle", "stale", "models", *alone])
    options = parser.parse_args()
    if options.only == "models":
        return models()
    if options.only in alone:
        return alone[options.only](options.rounds)
    if options.only != "stale":
        pairs: list[Pair] = []
        try:
            for name in CONNECTORS:
                pairs.append(Pair.start(name))
                pairs[-1].wait_up()
                story = _story(pairs[-1])
                pairs[-1].signal(signal.SIGSTOP)
            if options.only != "idle":
                speed(pairs, story, options.rounds)
            if options.only != "speed":
                idle(pairs, options.idle_s)
        finally:
            for pair in pairs:
                pair.kill()
    if options.only in (None, "stale"):
        print(
            f"\nStale: lease {LEASE_S} s, {STALE_BLOCKS} blocks a side, used after {LEASE_S + 3} s and {OTHERS} prompts"
        )
        for name in CONNECTORS:
            stale(name)


if __name__ == "__main__":
    main()
