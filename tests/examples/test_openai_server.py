"""The example server as users start it: real model, real NIXL, the real openai client, and workers that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
import uvloop
from doc_blocks import PAGES, blocks_of
from paged_engine import Sampling
from paged_engine.tokenizer import ChatTokenizer, TextStream
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from server_load import ALL_QUESTIONS, Load, Question, Tally, answers_alone, run_clients, tokens_alone
from tests_support import until
from tiny_model import EXAMPLES, RunPython

import kvflow

SERVER = EXAMPLES / "openai_server"
MODEL = "SmolLM2-135M-Instruct"
FRANCE = Question(text="The capital of France is", chat=False)
STORY = Question(text="Once upon a time", chat=False)
COUNTING = Question(text="1, 2, 3,", chat=False)
SUM = Question(text="What is 2+2? Answer with one number.", chat=True)
SMILEY = Question(text="Write the word dog in Japanese, and a smiley.", chat=True)
ASKED = (FRANCE, STORY, COUNTING, SUM, SMILEY)
HOSTS_DIFFER = ("--deadline-s", "240")  # a busy one takes minutes for what takes seconds on a quiet one
LINE_TIMEOUT_S = 240.0  # a worker that starts, or starts again, loads its model first

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(600)]


@dataclass
class Running:
    """The service, started once for all tests here: two workers of each kind."""

    process: subprocess.Popen[str]
    workers: dict[str, str] = field(default_factory=dict)
    url: str = ""
    lines: queue.Queue[str] = field(default_factory=queue.Queue)

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until it prints such a line."""
        seen = []
        try:
            while (match := re.search(pattern, line := self.lines.get(timeout=LINE_TIMEOUT_S))) is None:
                seen.append(line)
        except queue.Empty:
            raise AssertionError(f"never printed {pattern!r}, but:\n{''.join(seen)}") from None
        return match

    def get(self, name: str | None, path: str) -> str:
        """Return the answer of a worker, or of the router for None."""
        with urllib.request.urlopen(f"{self.workers[name] if name else self.url}/{path}", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def health(self, name: str | None = None) -> dict[str, Any]:
        health: dict[str, Any] = json.loads(self.get(name, "health"))
        return health

    def samples(self, name: str | None = None) -> list[Sample]:
        """Everything at /metrics, as Prometheus reads it."""
        families = text_string_to_metric_families(self.get(name, "metrics"))
        return [sample for family in families for sample in family.samples]

    def metric(self, name: str | None, sample: str, **labels: str) -> float:
        """The samples of that name that have these labels, put together."""
        return sum(
            one.value for one in self.samples(name) if one.name == sample and labels.items() <= one.labels.items()
        )

    def blocks_used(self) -> int:
        return sum(self.health(name)["blocks_used"] for name in self.workers)

    def until_idle(self) -> None:
        """Ask until no worker has blocks in use; the test's timeout bounds it."""
        while self.blocks_used():
            pass


@pytest.fixture(scope="module")
def running(smollm2_checkpoint: Path) -> Iterator[Running]:
    with service(smollm2_checkpoint, workers_each=2) as running:
        yield running


@contextmanager
def service(checkpoint: Path, *, workers_each: int) -> Iterator[Running]:
    counts = [word for role in ("--prefill", "--decode") for word in (role, str(workers_each))]
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "serve", *counts, "--port", "0", "--checkpoint", str(checkpoint), *HOSTS_DIFFER],
        env=os.environ | {"PYTHONPATH": str(Path(kvflow.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = Running(process)
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: [running.lines.put(line) for line in process.stdout or ()])
    reader.start()
    try:
        pids = dict(running.expect(r"^(\w+-\d|router): process (\d+)$").groups() for _ in range(2 * workers_each + 1))
        running.url = running.expect(r"^ready: (\S+)/v1$")[1]
        for worker in running.health()["workers"]:
            running.workers[worker["name"]] = worker["url"]
            assert running.health(worker["name"])["pid"] == int(pids[worker["name"]]), "whom the tutorial kills"
        yield running
    finally:
        pids = [running.health(name)["pid"] for name in running.workers]
        process.terminate()
        process.wait(timeout=60)
        reader.join(timeout=60)
        process.stdout.close()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with client_of(running) as client:
        yield client


def client_of(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=240)


@dataclass(frozen=True)
class Alone:
    """Answers of one engine alone."""

    tokenizer: ChatTokenizer
    tokens: Mapping[Question, Sequence[int]]

    def __call__(self, question: Question, tokens: int) -> str:
        """Return a text of `tokens` tokens, or a shorter one if the answer ends earlier."""
        return TextStream(self.tokenizer, self.tokens[question][:tokens]).text


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Engines in this process take one thread; other tests get theirs back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(smollm2_checkpoint: Path, one_thread: None) -> Alone:
    return Alone(ChatTokenizer(smollm2_checkpoint), uvloop.run(tokens_alone(smollm2_checkpoint, ASKED, 60)))


class Piece(NamedTuple):
    text: str
    finish_reason: str | None


def arguments_of(client: openai.OpenAI, question: Question) -> tuple[Any, dict[str, Any]]:
    """Return the client's method for a question, and its arguments."""
    if question.chat:
        return client.chat.completions.create, {"model": MODEL, "messages": ask(question)}
    return client.completions.create, {"model": MODEL, "prompt": question.text}


def ask(question: Question) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.text}]


def streamed_of(client: openai.OpenAI, question: Question, **parameters: Any) -> Piece:
    """A streamed answer, whatever way it is asked for, put together."""
    create, asked = arguments_of(client, question)
    *earlier, last = [chunk.choices[0] for chunk in create(**asked, stream=True, **parameters)]
    assert {one.finish_reason for one in earlier} <= {None}
    texts = [(one.delta.content or "") if question.chat else one.text for one in (*earlier, last)]
    return Piece("".join(texts), last.finish_reason)


def whole_of(client: openai.OpenAI, question: Question, **parameters: Any) -> Piece:
    """The same in one piece."""
    create, asked = arguments_of(client, question)
    (choice,) = create(**asked, **parameters).choices
    return Piece(choice.message.content if question.chat else choice.text, choice.finish_reason)


def test_a_service_of_a_tiny_model_answers_as_one_process_does(tiny_chat: Path, one_thread: None) -> None:
    """The whole service, one worker of each kind: a completion, a stream, a stop, an error, health, and its end."""
    alone = Alone(ChatTokenizer(tiny_chat), uvloop.run(tokens_alone(tiny_chat, [FRANCE, SUM], 12)))
    with service(tiny_chat, workers_each=1) as running, client_of(running) as client:
        text = alone(FRANCE, 12)
        assert whole_of(client, FRANCE, max_tokens=12) == Piece(text, "length")
        assert streamed_of(client, FRANCE, max_tokens=12) == Piece(text, "length")
        assert whole_of(client, SUM, max_tokens=12).text == alone(SUM, 12)
        stopped = Piece(text[: text.index(text[6:8])], "stop")
        assert whole_of(client, FRANCE, max_tokens=12, stop=text[6:8]) == stopped
        assert streamed_of(client, FRANCE, max_tokens=12, stop=[text[6:8], "no such text"]) == stopped
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="gpt-7", prompt="a")
        running.until_idle()
        assert running.metric("decode-0", "kvflow_loads_total", outcome="loaded") >= 4
        assert running.health()["status"] == "ok"


@pytest.mark.thorough
class TestService:
    """With the real model, and two workers of each kind.

    Thorough: see `test_a_service_of_a_tiny_model_answers_as_one_process_does` of this file.
    """

    def test_answers_look_as_openais(self, client: openai.OpenAI, alone: Alone, smollm2_checkpoint: Path) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        usage = client.completions.create(model=MODEL, prompt=FRANCE.text, max_tokens=12).usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 12, 17)
        answer = client.chat.completions.create(model=MODEL, messages=ask(SUM), max_tokens=60)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            alone(SUM, 60),
            "stop",  # by itself
        )
        assert answer.usage.completion_tokens < 60
        chunks = client.chat.completions.create(
            model=MODEL, messages=ask(SUM), max_tokens=60, stream=True, stream_options={"include_usage": True}
        )
        first, *_, last = chunks
        assert (first.choices[0].delta.role, last.usage) == ("assistant", answer.usage)
        prompt = ChatTokenizer(smollm2_checkpoint).encode_text(STORY.text)
        assert client.completions.create(model=MODEL, prompt=prompt, max_tokens=8).choices[0].text == alone(STORY, 8)

    def test_health_and_metrics_tell_what_happened(self, running: Running, client: openai.OpenAI) -> None:
        client.completions.create(model=MODEL, prompt="One two three", max_tokens=3)
        running.until_idle()
        assert running.health()["status"] == "ok"
        assert {worker["name"]: worker["role"] for worker in running.health()["workers"]} == {
            name: name.split("-")[0] for name in running.workers
        }
        assert running.health("prefill-0").keys() >= {"pid", "runtime", "blocks_used", "blocks_free"}
        assert running.metric(None, "openai_server_requests_total", outcome="ok") >= 1
        assert running.metric(None, "openai_server_workers_up", role="decode") == 2
        for name in running.workers:  # kvflow's own are beside theirs
            samples = running.samples(name)
            kvflows = {"kvflow_blocks", "kvflow_open_loads", "kvflow_open_leases", "kvflow_reads_total"}
            assert kvflows <= {sample.name for sample in samples}
            assert {sample.labels["engine"] for sample in samples if "engine" in sample.labels} == {name}

        def total(sample: str, **labels: str) -> float:
            return sum(running.metric(name, sample, **labels) for name in running.workers)

        assert total("kvflow_loads_total", outcome="loaded") >= 1
        assert total("kvflow_leases_total", outcome="read") >= 1

    @pytest.mark.parametrize("question", [STORY, SMILEY], ids=["completion", "chat"])
    def test_a_seed_gives_what_one_process_draws(
        self, client: openai.OpenAI, alone: Alone, smollm2_checkpoint: Path, question: Question
    ) -> None:
        """Also the first token, which the prefill worker draws, and whichever workers the answer comes from."""
        parameters: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
        tokens = uvloop.run(tokens_alone(smollm2_checkpoint, [question], 12, Sampling(**parameters)))[question]
        right = TextStream(alone.tokenizer, tokens).text
        assert right != alone(question, 12)
        assert {whole_of(client, question, **parameters, max_tokens=12).text for _ in range(3)} == {right}
        assert streamed_of(client, question, **parameters, max_tokens=12).text == right

    def test_tokens_are_counted_up_to_the_stop_string(self, client: openai.OpenAI, alone: Alone) -> None:
        stop = alone(COUNTING, 40)[12:14]
        parameters = {"model": MODEL, "prompt": COUNTING.text, "max_tokens": 40, "stop": stop}
        usage = client.completions.create(**parameters).usage
        assert 1 < usage.completion_tokens < 30
        streamed = client.completions.create(**parameters, stream=True, stream_options={"include_usage": True})
        assert list(streamed)[-1].usage == usage

    def test_what_cannot_be_right_is_refused(self, client: openai.OpenAI) -> None:
        for wrong, kind, param, message in (
            ({"model": "gpt-7"}, openai.NotFoundError, "model", "'gpt-7' does not exist"),
            ({"prompt": ""}, openai.BadRequestError, "prompt", "at least one token"),
            ({"prompt": [1, 10**9]}, openai.BadRequestError, "prompt", "1000000000 is not a token"),
            ({"max_tokens": 10**5}, openai.BadRequestError, "prompt", "4096 tokens. However, you requested 100001"),
            ({"n": 2}, openai.BadRequestError, "n", "n: Input should be 1"),
            ({"extra_body": {"top_k": 5}}, openai.BadRequestError, "top_k", "top_k: this server does not support it"),
        ):
            with pytest.raises(kind, match=message) as caught:
                client.completions.create(**{"model": MODEL, "prompt": "a", "max_tokens": 1} | wrong)
            assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=ask(SUM), max_tokens=10**5)
        assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded"), "the client's words"

    def test_the_tutorials_client_is_answered(self, running: Running, capsys: pytest.CaptureFixture[str]) -> None:
        """As it stands there, but for the port."""
        page = "docs/server.md"
        (block,) = [block for block in blocks_of(page, PAGES[page].read_text()) if block.kind == "python"]
        exec(block.text.replace("http://127.0.0.1:8000", running.url), {})
        assert capsys.readouterr().out.strip()

    def test_so_is_what_is_no_request_at_all(self, running: Running, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.embeddings.create(model=MODEL, input="a")
        assert unknown.value.type == "invalid_request_error"
        request = urllib.request.Request(f"{running.url}/v1/completions", data=b"{", method="POST")
        request.add_header("Content-Type", "application/json")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        error = json.load(caught.value)["error"]
        assert (caught.value.code, error["type"], error["param"]) == (400, "invalid_request_error", None)
        assert "JSON" in error["message"]

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_a_worker_refuses_what_is_no_message(self, running: Running, role: str) -> None:
        for body, message in (("{", "truncated"), ("{}", "request_id"), ('{"extra": 1}', "extra")):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{running.workers[f'{role}-0']}/{role}", data=body.encode(), timeout=60)
            assert caught.value.code == 422
            assert message in caught.value.read().decode()
        assert running.health(f"{role}-0")["runtime"] == "open"

    def test_a_deadline_ends_a_whole_answer(self, running: Running, client: openai.OpenAI) -> None:
        with pytest.raises(openai.APIStatusError, match="before its deadline") as caught:
            client.completions.create(model=MODEL, prompt="a b", max_tokens=2000, extra_body={"deadline_s": 0.7})
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        running.until_idle()

    def test_a_deadline_ends_a_stream_that_has_begun(
        self, running: Running, client: openai.OpenAI, alone: Alone
    ) -> None:
        text, deadline_s = "", 1
        while not text:  # a host may be too slow for a first token within the deadline
            deadline_s *= 2
            with pytest.raises(openai.APIError, match="before its deadline") as caught:
                for piece in client.completions.create(
                    model=MODEL,
                    prompt=COUNTING.text,
                    max_tokens=2000,
                    stream=True,
                    extra_body={"deadline_s": deadline_s},
                ):
                    text += piece.choices[0].text
            assert caught.value.code == "deadline_exceeded"
        assert alone(COUNTING, 60).startswith(text)
        running.until_idle()

    def test_a_client_that_leaves_frees_its_blocks(self, running: Running, client: openai.OpenAI) -> None:
        with client.completions.create(model=MODEL, prompt="c d", max_tokens=2000, stream=True) as stream:
            next(iter(stream))
            assert running.blocks_used() > 0
        running.until_idle()
        assert running.metric(None, "openai_server_requests_total", outcome="client_gone") >= 1

    def test_a_killed_prefill_worker_costs_no_answer(
        self, running: Running, client: openai.OpenAI, alone: Alone
    ) -> None:
        os.kill(running.health("prefill-0")["pid"], signal.SIGKILL)
        assert {whole_of(client, FRANCE, max_tokens=4).text for _ in range(3)} == {alone(FRANCE, 4)}
        running.expect("prefill-0 died with status -9")
        running.expect("prefill-0 is up")
        # The same name, but a new incarnation: decode workers shake hands with it again.
        assert {whole_of(client, FRANCE, max_tokens=4).text for _ in range(4)} == {alone(FRANCE, 4)}
        assert running.metric("prefill-0", "kvflow_leases_total", outcome="read") >= 1

    def test_a_killed_decode_worker_costs_its_streams_and_nothing_else(
        self, running: Running, client: openai.OpenAI, alone: Alone
    ) -> None:
        def stream() -> tuple[str, str | None]:
            text = ""
            try:
                pieces = client.completions.create(model=MODEL, prompt=COUNTING.text, max_tokens=40, stream=True)
                for index, piece in enumerate(pieces):
                    text += piece.choices[0].text
                    if index == 0:
                        begun.release()
            except openai.APIError as error:
                told.append(str(error))
                return text, error.code
            return text, None

        right, told = alone(COUNTING, 40), list[str]()
        begun, pid = threading.Semaphore(0), running.health("decode-0")["pid"]
        with ThreadPoolExecutor() as threads:
            # First the one kind, then the other: both decode workers have one of each.
            streams = [threads.submit(stream) for _ in range(2)]
            for _ in streams:
                assert begun.acquire(timeout=60)
            os.kill(pid, signal.SIGSTOP)  # before it is through with its stream
            wholes = [threads.submit(whole_of, client, COUNTING, max_tokens=40) for _ in range(2)]
            os.kill(pid, signal.SIGKILL)
            outcomes = sorted((future.result() for future in streams), key=lambda outcome: outcome[1] or "")
            assert [future.result().text for future in wholes] == [right] * 2
        (complete, no_error), (cut, error) = outcomes
        assert (complete, no_error) == (right, None)
        assert error == "worker_lost"
        assert "decode-" not in told[0], "which worker it was is nobody's affair outside"
        assert right.startswith(cut)
        assert cut != right
        running.expect("decode-0 is up")
        running.until_idle()

    def test_no_wrong_answer_while_a_worker_is_killed(
        self, running: Running, smollm2_checkpoint: Path, one_thread: None
    ) -> None:
        right = uvloop.run(answers_alone(smollm2_checkpoint, ALL_QUESTIONS[:8], 8))
        load, tally = Load(clients=12, requests=2, tokens=8), Tally()

        async def killed() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_clients(running.url, load, right, tally))
                await until(lambda: tally.ended >= 12)
                os.kill(running.health("decode-0")["pid"], signal.SIGKILL)

        uvloop.run(killed())
        assert tally.good, (tally.wrong, tally.unclear)
        assert tally.ended == 24
        assert tally.right >= 12
        running.expect("decode-0 is up")
        running.until_idle()


def test_says_what_is_not_installed(run_python: RunPython) -> None:
    lines = (
        "import runpy, sys",
        "sys.modules['fastapi'] = sys.modules['gguf'] = None",
        f"sys.argv = ['server', 'serve']; runpy.run_path({str(SERVER)!r}, run_name='__main__')",
    )
    done = run_python("-c", "\n".join(lines))
    assert done.returncode == 2
    assert re.search(r"^error: not installed: (gguf, fastapi|fastapi, gguf)\..*--group examples", done.stderr)
