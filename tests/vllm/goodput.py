"""Goodput of real vLLM pairs: kvflow's connector beside vLLM's NixlConnector, by the rate at which requests arrive.

A router (tests/vllm/router.py) stands before each pair. Requests arrive at random moments, the same for all contenders.
A request is good if its first token and its mean time per further token are within the bounds, and if its text is the
one that a single engine gives. Run it in the environment of `python3 dev.py vllm`, on a machine that does nothing else:

    .venv-vllm/bin/python tests/vllm/goodput.py [--rates 0.3 0.6 0.9] [--seconds 40] [--only rates|killed|prefixes]
        [--json docs/data/goodput.json]

`rates`: one prefill and one decode engine of each contender, all alive; they take turns, and those that wait are
stopped (SIGSTOP). `killed`: two prefill engines and a decode engine; one prefill engine is killed after a third of the
time, and started again; kvflow also with a router that has both compute each prompt, so that the decode engine takes
the blocks of whichever lives. `prefixes`: two prefill engines, and prompts whose beginnings come back at the other
engine: kvflow with and without pulls from the other engine's cache, and NixlConnector, which has none.

NixlConnector is there as it comes, and with a progress thread that does not spin (tests/vllm/fair_nixl.py): the first
keeps a core of each engine busy, which a machine of two cores does not have.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.ports import free_port
from tests.vllm.compare import FAIR, setup_of
from tests.vllm.servers import NAME, ROOT, VERSION, Server, Setup, proxied

CONTENDERS = ("kvflow", FAIR, "nixl")
LENGTHS = (50, 100, 150, 300)
PROMPTS, TOKENS = 16, 16
SHARED, OWN, GROUPS = 256, 20, 8  # `prefixes`: tokens that prompts of a group share, and those that they do not
WARM_UP = 4
PATIENCE_S = 60.0
"""Seconds without a token after which a client hangs up: its request is lost."""


@dataclass(frozen=True)
class Bounds:
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Answer:
    """One request: seconds to its first token, mean seconds per further token, and its text; or why it has none."""

    ttft_s: float
    tpot_s: float
    text: str
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the requests of one run found."""

    run: str
    contender: str
    offered_per_s: float
    good_per_s: float
    requests: int
    lost: int
    wrong: int
    late: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float

    @classmethod
    def of(
        cls,
        run: str,
        contender: str,
        answers: Sequence[tuple[Answer, str]],
        seconds: float,
        bounds: Bounds,
    ) -> Row:
        """`answers`: each with the right text."""
        whole = [(answer, text) for answer, text in answers if not answer.error]
        wrong = [answer for answer, text in whole if answer.text != text]
        right = [answer for answer, text in whole if answer.text == text]
        good = [answer for answer in right if answer.ttft_s <= bounds.ttft_s and answer.tpot_s <= bounds.tpot_s]
        firsts = sorted(1e3 * answer.ttft_s for answer, _ in whole) or [float("nan")]
        rests = [1e3 * answer.tpot_s for answer, _ in whole] or [float("nan")]
        return cls(
            run=run,
            contender=contender,
            offered_per_s=round(len(answers) / seconds, 3),
            good_per_s=round(len(good) / seconds, 3),
            requests=len(answers),
            lost=len(answers) - len(whole),
            wrong=len(wrong),
            late=len(right) - len(good),
            ttft_p50_ms=round(statistics.median(firsts), 1),
            ttft_p99_ms=round(firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))], 1),
            tpot_p50_ms=round(statistics.median(rests), 1),
        )

    def __str__(self) -> str:
        return (
            f"{self.run:18} {self.contender:18} {self.good_per_s:5.2f} of {self.offered_per_s:5.2f}/s  "
            f"lost {self.lost:2} wrong {self.wrong:2} late {self.late:2} of {self.requests:3}  "
            f"TTFT {self.ttft_p50_ms:7.0f} p99 {self.ttft_p99_ms:7.0f}  per token {self.tpot_p50_ms:6.1f} ms"
        )


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    text: str
    """The answer of one engine alone."""


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the seconds at which requests arrive, from 0 on: a Poisson process, the same for the same seed."""
    draw, now_s, found = random.Random(seed), 0.0, []
    while (now_s := now_s + draw.expovariate(rate)) < seconds:
        found.append(now_s)
    return found


async def ask(client: httpx.AsyncClient, prompt: Prompt, salt: str) -> Answer:
    """Return what a client of the router sees. An error, or no token for `PATIENCE_S`, is a lost request."""
    body = {
        "model": NAME,
        "prompt": prompt.tokens,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt,
    }
    began_s = time.perf_counter()
    moments, text = [], ""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as lines:
            if lines.status_code != 200:
                return Answer(0.0, 0.0, "", f"HTTP {lines.status_code}")
            async for line in lines.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "choices" not in event:
                        return Answer(0.0, 0.0, "", f"an error in the stream: {str(event)[:80]}")
                    moments.append(time.perf_counter())
                    text += event["choices"][0]["text"]
    except httpx.HTTPError as error:
        return Answer(0.0, 0.0, "", type(error).__name__)
    if not moments:
        return Answer(0.0, 0.0, "", "an empty stream")
    return Answer(moments[0] - began_s, (moments[-1] - moments[0]) / (TOKENS - 1), text)


async def drive(
    url: str,
    prompts: Sequence[Prompt],
    salt_of: Callable[..., str],
    starts_s: Sequence[float],
    meanwhile: Callable[[], Coroutine[None, None, None]] | None = None,
) -> list[tuple[Answer, str]]:
    """Ask the router at `url` at each of `starts_s`. Return each answer with the right text."""

    async def one(index: int, start_s: float) -> tuple[Answer, str]:
        await asyncio.sleep(start_s)
        prompt = prompts[index % len(prompts)]
        return await ask(client, prompt, salt_of(index)), prompt.text

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        asked = [group.create_task(one(index, start_s)) for index, start_s in enumerate(starts_s)]
        if meanwhile is not None:
            group.create_task(meanwhile())
    return [task.result() for task in asked]


@dataclass(frozen=True)
class Fleet:
    """The servers of one contender."""

    name: str
    producers: list[Server]
    consumer: Server

    @classmethod
    def start(cls, name: str, producers: int, port: int, more: Mapping[str, object] | None = None) -> Fleet:
        """`more`: keys of kvflow's own configuration at the prefill engines, that of each with its own `listen`."""
        made = [_changed(setup_of(name, "producer", 0, port=port + 20 * turn), more) for turn in range(producers)]
        if more is not None:
            ports = [free_port() for _ in made]
            addresses = [f"tcp://127.0.0.1:{one}" for one in ports]
            for turn, address in enumerate(addresses):
                others = [other for other in addresses if other != address]
                shares = bool(more.get("share_prefixes"))
                own = {"listen": address, **({"prefix_peers": others} if shares else {})}
                both = replace(made[turn], role="kv_both", policy="recompute") if shares else made[turn]
                made[turn] = replace(both, extra=(*made[turn].extra, *own.items()))
        decode = setup_of(name, "consumer", 1, port=port)
        return cls(name, [Server.start(setup) for setup in made], Server.start(decode))

    @property
    def servers(self) -> list[Server]:
        return [*self.producers, self.consumer]

    def wait_up(self) -> None:
        for server in self.servers:
            server.wait_up()

    def signal(self, what: signal.Signals) -> None:
        for server in self.servers:
            server.signal(what)

    def kill(self) -> None:
        for server in self.servers:
            if server.alive:
                server.kill()

    @contextmanager
    def router(self, options: Sequence[str] = ()) -> Iterator[str]:
        with proxied(self.producers, self.consumer, options=options) as client:
            yield str(client.base_url)


def _changed(setup: Setup, more: Mapping[str, object] | None) -> Setup:
    return setup if not more else replace(setup, extra=(*setup.extra, *more.items()))


def prompts_of(server: Server) -> list[Prompt]:
    """Return prompts of all lengths, with the answers of `server` alone."""
    story = server.tokens((ROOT / "docs" / "architecture.md").read_text("utf-8"))
    made = []
    for turn in range(PROMPTS):
        tokens = story[17 * turn :][: LENGTHS[turn % len(LENGTHS)]]
        made.append(Prompt(tokens, server.text(tokens, TOKENS, cache_salt="alone", ignore_eos=True)))
    return made


def rates(options: argparse.Namespace, bounds: Bounds) -> Iterator[Row]:
    """Goodput over the rate of arrivals, one prefill and one decode engine; contenders take turns at each rate."""
    with ExitStack() as stack:
        fleets: list[Fleet] = []
        routers: dict[str, str] = {}
        prompts: list[Prompt] = []
        for turn, name in enumerate(CONTENDERS):
            fleet = Fleet.start(name, 1, 18600 + 40 * turn)
            stack.callback(fleet.kill)  # which also ends servers that are stopped
            fleet.wait_up()
            prompts = prompts or prompts_of(fleet.producers[0])
            routers[name] = stack.enter_context(fleet.router())
            warm_up(routers[name], prompts, name)
            fleet.signal(signal.SIGSTOP)
            fleets.append(fleet)
        for turn, rate in enumerate(options.rates):
            starts_s = arrivals(rate, options.seconds, seed=turn)
            for fleet in fleets[turn % len(fleets) :] + fleets[: turn % len(fleets)]:
                fleet.signal(signal.SIGCONT)
                found = asyncio.run(drive(routers[fleet.name], prompts, f"{rate} {{}}".format, starts_s))
                fleet.signal(signal.SIGSTOP)
                yield Row.of(f"{rate:g}/s", fleet.name, found, options.seconds, bounds)


def killed(options: argparse.Namespace, bounds: Bounds) -> Iterator[Row]:
    """Two prefill engines; one is killed after a third of the time and started again at once."""
    prompts: list[Prompt] = []
    starts_s = arrivals(options.killed_rate, options.killed_seconds, seed=99)
    contenders = [(name, name, ()) for name in CONTENDERS]
    contenders.insert(1, ("kvflow, by both", "kvflow", ("--copies", "2")))
    for turn, (label, name, router) in enumerate(contenders):
        fleet = Fleet.start(name, 2, 18800 + 60 * turn)
        try:
            fleet.wait_up()
            prompts = prompts or prompts_of(fleet.producers[0])
            with fleet.router(router) as url:
                warm_up(url, prompts, label)

                async def kill_one(fleet: Fleet = fleet) -> None:
                    await asyncio.sleep(options.killed_seconds / 3)
                    victim = fleet.producers[0]
                    await asyncio.to_thread(victim.kill)
                    fleet.producers[0] = Server.start(victim.setup, port=victim.port)

                found = asyncio.run(drive(url, prompts, "killed {}".format, starts_s, kill_one))
        finally:
            fleet.kill()
        yield Row.of("a prefill killed", label, found, options.killed_seconds, bounds)


def prefixes(options: argparse.Namespace, bounds: Bounds) -> Iterator[Row]:
    """Prompts of `GROUPS` shared beginnings; each comes back once, after all the others, and at the other engine."""
    contenders = (
        ("kvflow, pulls", "kvflow", {"share_prefixes": True}),
        ("kvflow, alone", "kvflow", {}),
        (FAIR, FAIR, None),
    )
    for turn, (label, name, more) in enumerate(contenders):
        fleet = Fleet.start(name, 2, 19100 + 60 * turn, more)
        try:
            fleet.wait_up()
            story = fleet.consumer.tokens((ROOT / "docs" / "architecture.md").read_text("utf-8"))
            prompts = []
            for index in range(2 * GROUPS):
                begin = 41 * ((index + index // GROUPS) % GROUPS)  # requests go to the two engines in turn
                tokens = [*story[begin : begin + SHARED], *story[2000 + OWN * index :][:OWN]]
                prompts.append(Prompt(tokens, fleet.consumer.text(tokens, TOKENS, cache_salt="alone", ignore_eos=True)))
            with fleet.router() as url:
                warm_up(url, prompts, f"warm {label}")
                starts_s = arrivals(options.prefix_rate, 4 * GROUPS / options.prefix_rate, seed=7)[: 2 * GROUPS]
                found = asyncio.run(drive(url, prompts, "shared".format, starts_s))
        finally:
            fleet.kill()
        yield Row.of("shared prefixes", label, found, 2 * GROUPS / options.prefix_rate, bounds)


def warm_up(url: str, prompts: Sequence[Prompt], name: str) -> None:
    """Have the engines shake hands before anything is measured."""
    asyncio.run(drive(url, prompts, f"warm {name} {{}}".format, [float(turn) for turn in range(WARM_UP)]))


RUNS: dict[str, Callable[[argparse.Namespace, Bounds], Iterator[Row]]] = {
    "rates": rates,
    "killed": killed,
    "prefixes": prefixes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=RUNS, action="append")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--killed-rate", type=float, default=0.5)
    parser.add_argument("--killed-seconds", type=float, default=90.0)
    parser.add_argument("--prefix-rate", type=float, default=0.5)
    parser.add_argument("--ttft-ms", type=float, default=3000.0)
    parser.add_argument("--tpot-ms", type=float, default=150.0)
    parser.add_argument("--json", type=Path, help="a file to write; with --only it keeps the rows of the other runs")
    options = parser.parse_args()
    bounds = Bounds(options.ttft_ms / 1e3, options.tpot_ms / 1e3)
    print(f"vLLM {VERSION}; good: first token within {options.ttft_ms:g} ms, further ones {options.tpot_ms:g} ms each")
    rows = []
    for name in options.only or RUNS:
        for row in RUNS[name](options, bounds):
            rows.append(row)
            print(row, flush=True)
    if options.json:
        before = json.loads(options.json.read_text("utf-8")) if options.only else {"settings": {}, "rows": []}
        others = () if "rates" in (options.only or RUNS) else ("rates", "seconds")  # of rows that are kept
        setting = {key: value for key, value in vars(options).items() if key not in ("json", "only", *others)}
        kept = [row for row in before["rows"] if row["run"] not in {new.run for new in rows}]
        found = {"vllm": VERSION, "settings": before["settings"] | setting, "rows": [*kept, *map(asdict, rows)]}
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
