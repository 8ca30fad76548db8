"""Many clients at once, a worker killed in the middle, and a verdict; also the measurement on an idle machine.

The answers are compared with those of one engine that did everything by itself beforehand. A client may get an error,
if it is one of the server's own; it must never get a wrong answer, not even the beginning of one. In the end the
killed worker must be back and all blocks of all workers free.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import aiohttp
import openai
from paged_engine.weights import MODEL_NAME
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from openai_server.failures import STATUS
from openai_server.launcher import Service, ServiceSettings, start_service, unpack_model
from openai_server.worker import WorkerHealth
from openai_server.workload import ALL_QUESTIONS, Question, answers_alone

RECOVERY_TIMEOUT_S = 60.0
LOOK_AGAIN_S = 0.1
OVERHEAD = "openai_server_hand_over_overhead_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How much load."""

    clients: int
    requests: int
    """Of each client, one after the other."""
    tokens: int
    kill: Literal["prefill", "decode", "none"]


@dataclass(slots=True)
class Tally:
    """What has happened so far."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    unclear: list[str] = field(default_factory=list)
    """Errors that are none of the server's own."""
    seconds: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return self.right + len(self.wrong) + self.failed.total() + len(self.unclear)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What came of it."""

    tally: Tally
    killed: str
    took_s: float
    recovered_s: float | None
    """How long after the last answer all workers were up and all blocks free; None if that took too long."""

    @property
    def good(self) -> bool:
        return not self.tally.wrong and not self.tally.unclear and self.recovered_s is not None


async def run_load_test(service_settings: ServiceSettings, load: LoadSettings) -> int:
    """The whole test; 0 if nothing was wrong."""
    console = Console()
    async with _checkpoint(service_settings) as checkpoint:
        console.print(f"answering {len(ALL_QUESTIONS)} questions in one process, to know what is right")
        right = await answers_alone(checkpoint, ALL_QUESTIONS, load.tokens)
        console.print(f"starting {service_settings.prefill} prefill and {service_settings.decode} decode workers")
        async with start_service(replace(service_settings, checkpoint=checkpoint)) as service:
            result = await put_load(service, load, right)
            retries = _samples(await _fetch(f"{service.url}/metrics"), "openai_server_retries_total")
    _print_report(console, load, result)
    console.print(f"killed: {result.killed}; the router tried again {sum(retries.values()):.0f} times")
    return 0 if result.good else 1


async def put_load(service: Service, load: LoadSettings, right: Mapping[Question, str]) -> LoadResult:
    """Have all clients ask, kill a worker in the middle, and wait until the service is whole and idle again."""
    tally, began_s = Tally(), time.monotonic()
    async with asyncio.TaskGroup() as clients:
        for index in range(load.clients):
            clients.create_task(run_client(service.url, load, index, right, tally), name=f"client {index}")
        killed = await _kill_in_the_middle(service, load, tally)
    took_s = time.monotonic() - began_s
    return LoadResult(tally=tally, killed=killed, took_s=took_s, recovered_s=await _recovered(service))


async def run_measurement(service_settings: ServiceSettings, requests: int) -> int:
    """One request after the other; prints what the hand-over costs on top of the bytes."""
    console = Console()
    async with (
        _checkpoint(service_settings) as checkpoint,
        start_service(replace(service_settings, checkpoint=checkpoint)) as service,
    ):
        load = LoadSettings(clients=1, requests=requests, tokens=4, kill="none")
        await _ask_all(service, load)  # the first load of each pair of workers includes their handshake
        before = await overheads(service)
        await _ask_all(service, load)
        found = await overheads(service) - before
    console.print("from the end of the prompt's computation to the first decode step:")
    p50, p90 = (quantile(found, fraction) * 1e3 for fraction in (0.5, 0.9))
    console.print(f"p50 {p50:.2f} ms, p90 {p90:.2f} ms of {found.total()} requests")
    return 0


@asynccontextmanager
async def _checkpoint(settings: ServiceSettings) -> AsyncIterator[Path]:
    """The unpacked model."""
    if settings.checkpoint is not None:
        yield settings.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="kvflow-") as directory:
        await unpack_model(Path(directory))
        yield Path(directory)


async def run_client(url: str, load: LoadSettings, index: int, right: Mapping[Question, str], tally: Tally) -> None:
    """One client: its requests one after the other, every second one streamed."""
    questions = list(right)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for number in range(index, index + load.requests):
            question = questions[(number * 7) % len(questions)]
            await _ask(client, question, load.tokens, right[question], tally, stream=number % 2 == 0)


async def _ask(
    client: openai.AsyncOpenAI, question: Question, tokens: int, right: str, tally: Tally, *, stream: bool
) -> None:
    """One request; what came of it goes to the tally."""
    began_s = time.monotonic()
    text = ""
    try:
        if stream:
            async for piece in _pieces(client, question, tokens):
                if not text:
                    tally.first_token_s.append(time.monotonic() - began_s)
                text += piece
        else:
            text = await _whole(client, question, tokens)
    except openai.APIError as error:
        if not right.startswith(text):
            tally.wrong.append(f"{question.text!r}: {text!r} ({error})")
        elif error.code in STATUS:
            tally.failed[f"{error.code}{' in the middle of a stream' if text else ''}"] += 1
        else:
            tally.unclear.append(f"{type(error).__name__}: {error}")
        return
    tally.seconds.append(time.monotonic() - began_s)
    if text == right:
        tally.right += 1
    else:
        tally.wrong.append(f"{question.text!r}: {text!r}, not {right!r}")


async def _pieces(client: openai.AsyncOpenAI, question: Question, tokens: int) -> AsyncIterator[str]:
    if question.chat:
        async for chunk in await client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": question.text}], max_tokens=tokens, stream=True
        ):
            yield chunk.choices[0].delta.content or ""
    else:
        async for completion in await client.completions.create(
            model=MODEL_NAME, prompt=question.text, max_tokens=tokens, stream=True
        ):
            yield completion.choices[0].text


async def _whole(client: openai.AsyncOpenAI, question: Question, tokens: int) -> str:
    if question.chat:
        answer = await client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": question.text}], max_tokens=tokens
        )
        return answer.choices[0].message.content or ""
    completion = await client.completions.create(model=MODEL_NAME, prompt=question.text, max_tokens=tokens)
    return completion.choices[0].text


async def _ask_all(service: Service, load: LoadSettings) -> None:
    """The same without a look at the answers."""
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        for number in range(load.requests):
            await _whole(client, ALL_QUESTIONS[number % len(ALL_QUESTIONS)], load.tokens)


async def _kill_in_the_middle(service: Service, load: LoadSettings, tally: Tally) -> str:
    """Kill the first worker of that kind once half of the requests have ended; its name."""
    if load.kill == "none":
        return "nobody"
    name, url = next(iter((service.prefill if load.kill == "prefill" else service.decode).items()))
    while tally.ended < load.clients * load.requests // 2:  # noqa: ASYNC110 - checked often enough
        await asyncio.sleep(LOOK_AGAIN_S)
    os.kill((await _health(url)).pid, signal.SIGKILL)
    return name


async def _recovered(service: Service) -> float | None:
    """How long it took until all workers were up and idle; None if it took too long."""
    began_s = time.monotonic()
    urls = [*service.prefill.values(), *service.decode.values()]
    try:
        async with asyncio.timeout(RECOVERY_TIMEOUT_S):
            while not await _all_idle(service, urls):  # noqa: ASYNC110 - other processes are waited for
                await asyncio.sleep(LOOK_AGAIN_S)
    except TimeoutError:
        return None
    return time.monotonic() - began_s


async def _all_idle(service: Service, urls: Sequence[str]) -> bool:
    try:
        status = json.loads(await _fetch(f"{service.url}/health"))["status"]
        return status == "ok" and not any([(await _health(url)).blocks_used for url in urls])
    except aiohttp.ClientError:
        return False


async def _health(url: str) -> WorkerHealth:
    return WorkerHealth.model_validate_json(await _fetch(f"{url}/health"))


def _samples(metrics: str, name: str) -> dict[str, float]:
    """A metric's samples in the text of /metrics, by the value of their first label."""
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name
    }


async def _fetch(url: str) -> str:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        return await response.text()


async def overheads(service: Service) -> Counter[float]:
    """See `overheads_in`, of all decode workers."""
    return overheads_in([await _fetch(f"{url}/metrics") for url in service.decode.values()])


def overheads_in(workers: Sequence[str]) -> Counter[float]:
    """How many hand-overs had at most that overhead, and more than the next smaller one, by decode workers' metrics."""
    counts: Counter[float] = Counter()
    for metrics in workers:
        buckets = {float(bound): int(count) for bound, count in _samples(metrics, f"{OVERHEAD}_bucket").items()}
        for (_, below), (bound, count) in pairwise([(0.0, 0), *sorted(buckets.items())]):
            counts[bound] += count - below
    return counts


def quantile(counts: Counter[float], fraction: float) -> float:
    """The value that this fraction of a histogram lies below, a straight line drawn through its bucket."""
    wanted, below, lower = counts.total() * fraction, 0, 0.0
    for bound, count in sorted(counts.items()):
        if count and below + count >= wanted:
            return lower + (bound - lower) * (wanted - below) / count
        below, lower = below + count, bound
    raise ValueError("an empty histogram has no quantiles")


def _print_report(console: Console, load: LoadSettings, result: LoadResult) -> None:
    tally = result.tally
    table = Table(title=f"{load.clients} clients, {load.clients * load.requests} requests", show_header=False)
    table.add_row("right answers", str(tally.right))
    table.add_row("wrong answers", str(len(tally.wrong)))
    for code, count in sorted(tally.failed.items()):
        table.add_row(f"failed: {code}", str(count))
    table.add_row("unclear errors", str(len(tally.unclear)))
    table.add_row("time", f"{result.took_s:.1f} s, {tally.right * load.tokens / result.took_s:.0f} tokens/s")
    if tally.seconds:
        table.add_row("request, p50", f"{median(tally.seconds):.2f} s")
    if tally.first_token_s:
        table.add_row("first token, p50", f"{median(tally.first_token_s):.2f} s")
    back = "not in time" if result.recovered_s is None else f"{result.recovered_s:.1f} s after the last answer"
    table.add_row("all workers up, all blocks free", back)
    table.add_row("verdict", "[green]good[/]" if result.good else "[red]not as it should be[/]")
    console.print(table)
    for problem in [*tally.wrong, *tally.unclear][:10]:
        console.print(problem, style="red", markup=False)
