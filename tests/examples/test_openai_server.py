"""The example server as users start it: real model, real NIXL, the real openai client, and workers that are killed."""

from __future__ import annotations

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import openai
import pytest
import torch
import uvloop
from openai_server.launcher import Service
from openai_server.load_test import LoadSettings, put_load, quantile
from openai_server.workload import ALL_QUESTIONS, Question, answers_alone, tokens_alone
from paged_engine import Sampling
from paged_engine.tokenizer import ChatTokenizer, TextStream
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import kvflow

Greedy = Callable[[Sequence[int], int], list[int]]
RunPython = Callable[..., subprocess.CompletedProcess[str]]

SERVER = Path(__file__).parents[2] / "examples" / "openai_server"
MODEL = "SmolLM2-135M-Instruct"
FRANCE = Question(text="The capital of France is", chat=False)
STORY = Question(text="Once upon a time", chat=False)
COUNTING = Question(text="1, 2, 3,", chat=False)
SUM = Question(text="What is 2+2? Answer with one number.", chat=True)
SMILEY = Question(text="Write the word dog in Japanese, and a smiley.", chat=True)
ASKED = (FRANCE, STORY, COUNTING, SUM, SMILEY)
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

    def health(self, name: str | None = None) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.workers[name] if name else self.url}/health", timeout=60) as answer:
            health: dict[str, Any] = json.load(answer)
            return health

    def metric(self, name: str, sample: str) -> float:
        """One sample at /metrics of a worker, or of the router for ""."""
        with urllib.request.urlopen(f"{self.workers.get(name, self.url)}/metrics", timeout=60) as answer:
            match = re.search(rf"^{re.escape(sample)} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(match[1]) if match else 0.0

    def samples(self, name: str) -> list[Sample]:
        """Everything at /metrics of a worker, as Prometheus reads it."""
        with urllib.request.urlopen(f"{self.workers[name]}/metrics", timeout=60) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return [sample for family in families for sample in family.samples]

    def kill(self, name: str) -> None:
        os.kill(self.health(name)["pid"], signal.SIGKILL)

    def blocks_used(self) -> int:
        return sum(self.health(name)["blocks_used"] for name in self.workers)

    def until_idle(self) -> None:
        """Ask until no worker has blocks in use; the test's timeout bounds it."""
        while self.blocks_used():
            pass


@pytest.fixture(scope="module")
def running(smollm2: tuple[Path, Greedy]) -> Iterator[Running]:
    with service(smollm2[0], workers_each=2) as running:
        yield running


@contextmanager
def service(checkpoint: Path, *, workers_each: int) -> Iterator[Running]:
    counts = [word for role in ("--prefill", "--decode") for word in (role, str(workers_each))]
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "serve", *counts, "--port", "0", "--checkpoint", str(checkpoint)],
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
        for _ in range(2 * workers_each):
            name, url = running.expect(r"^(\w+-\d): (http://\S+)$").groups()
            running.workers[name] = url
        running.url = running.expect(r"^ready: (\S+)/v1$")[1]
        yield running
    finally:
        pids = [running.health(name)["pid"] for name in running.workers]
        process.terminate()
        process.wait(timeout=60)
        reader.join(timeout=60)
        process.stdout.close()
    assert [pid for pid in pids if alive(pid)] == []


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with client_of(running) as client:
        yield client


def client_of(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=240)


@dataclass(frozen=True)
class Alone:
    """What one engine answers all by itself."""

    tokenizer: ChatTokenizer
    tokens: Mapping[Question, Sequence[int]]

    def __call__(self, question: Question, tokens: int) -> str:
        """The text of so many tokens, or fewer if the answer ends by itself."""
        return TextStream(self.tokenizer, self.tokens[question][:tokens]).text


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Engines in this process take one thread; other tests get theirs back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(smollm2: tuple[Path, Greedy], one_thread: None) -> Alone:
    return Alone(ChatTokenizer(smollm2[0]), uvloop.run(tokens_alone(smollm2[0], ASKED, 60)))


def ask(question: Question) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.text}]


def test_a_service_of_a_tiny_model_answers_as_one_process_does(tiny_chat: Path, one_thread: None) -> None:
    """The whole service, one worker of each kind: a completion, a stream, a stop, an error, health, and its end."""
    alone = Alone(ChatTokenizer(tiny_chat), uvloop.run(tokens_alone(tiny_chat, [FRANCE, SUM], 12)))
    with service(tiny_chat, workers_each=1) as running, client_of(running) as client:
        text = alone(FRANCE, 12)
        assert whole_of(client, FRANCE, max_tokens=12) == Piece(text, "length")
        assert joined(pieces_of(client, FRANCE, max_tokens=12)) == Piece(text, "length")
        assert whole_of(client, SUM, max_tokens=12).text == alone(SUM, 12)
        assert whole_of(client, FRANCE, max_tokens=12, stop=text[6:8]) == Piece(text[: text.index(text[6:8])], "stop")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="gpt-7", prompt="a")
        running.until_idle()
        assert running.metric("decode-0", 'openai_server_load_seconds_count{phase="wire"}') >= 4
        assert running.health()["status"] == "ok"


@pytest.mark.thorough
class TestAnswers:
    """Thorough: see `test_a_service_of_a_tiny_model_answers_as_one_process_does` of this file."""

    def test_models(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL

    def test_a_completion_is_what_one_process_says(self, client: openai.OpenAI, alone: Alone) -> None:
        answer = client.completions.create(model=MODEL, prompt=FRANCE.text, max_tokens=12)
        assert answer.choices[0].text == alone(FRANCE, 12)
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)

    def test_a_chat_is_what_one_process_says_and_ends_by_itself(self, client: openai.OpenAI, alone: Alone) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=ask(SUM), max_tokens=60)
        assert answer.choices[0].message.content == alone(SUM, 60)
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 60

    def test_streams_grow_to_the_same_text(self, client: openai.OpenAI, alone: Alone) -> None:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=ask(SMILEY),
                max_tokens=16,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        *pieces, usage = chunks
        assert pieces[0].choices[0].delta.role == "assistant"
        deltas = [piece.choices[0].delta.content or "" for piece in pieces]
        assert "".join(deltas) == alone(SMILEY, 16)
        assert len([delta for delta in deltas if delta]) > 5
        assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert usage.usage.completion_tokens == 16

    def test_a_completion_streams_too_and_takes_tokens(
        self, client: openai.OpenAI, alone: Alone, smollm2: tuple[Path, Greedy]
    ) -> None:
        prompt = ChatTokenizer(smollm2[0]).encode_text(STORY.text)
        pieces = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == alone(STORY, 8)

    def test_health_and_metrics_tell_what_happened(self, running: Running, client: openai.OpenAI) -> None:
        client.completions.create(model=MODEL, prompt="One two three", max_tokens=3)
        assert running.health()["status"] == "ok"
        assert {worker["name"]: worker["role"] for worker in running.health()["workers"]} == {
            name: name.split("-")[0] for name in running.workers
        }
        assert running.metric("", 'openai_server_requests_total{outcome="ok"}') >= 1
        assert running.metric("", 'openai_server_workers_up{role="decode"}') == 2
        decoders = [name for name in running.workers if name.startswith("decode")]
        loads, overheads, loaded = (
            sum(running.metric(name, sample) for name in decoders)
            for sample in (
                'openai_server_load_seconds_count{phase="wire"}',
                "openai_server_hand_over_overhead_seconds_count",
                "openai_server_loaded_bytes_total",
            )
        )
        assert loads == overheads >= 1
        assert loaded > 0
        assert running.health("prefill-0").keys() >= {"pid", "runtime", "blocks_used", "blocks_free"}

    def test_workers_show_kvflows_metrics_beside_their_own(self, running: Running, client: openai.OpenAI) -> None:
        client.completions.create(model=MODEL, prompt="One two three four", max_tokens=3)
        running.until_idle()
        seen = {name: running.samples(name) for name in running.workers}
        for samples in seen.values():
            assert {"kvflow_blocks", "kvflow_open_loads", "kvflow_open_leases", "kvflow_reads_total"} <= {
                sample.name for sample in samples
            }
        engines = {
            (name, s.labels["engine"]) for name, samples in seen.items() for s in samples if "engine" in s.labels
        }
        assert engines == {(name, name) for name in running.workers}
        totals = {
            (s.name, s.labels.get("outcome")): s.value
            for samples in seen.values()
            for s in samples
            if s.name in ("kvflow_loads_total", "kvflow_leases_total") and s.value
        }
        assert totals["kvflow_loads_total", "loaded"] >= 1
        assert totals["kvflow_leases_total", "read"] >= 1


class Piece(NamedTuple):
    text: str
    finish_reason: str | None


def pieces_of(client: openai.OpenAI, question: Question, **parameters: Any) -> list[Piece]:
    """A streamed answer, whatever way it is asked for."""
    if question.chat:
        chunks = client.chat.completions.create(model=MODEL, messages=ask(question), stream=True, **parameters)
        return [Piece(one.choices[0].delta.content or "", one.choices[0].finish_reason) for one in chunks]
    chunks = client.completions.create(model=MODEL, prompt=question.text, stream=True, **parameters)
    return [Piece(one.choices[0].text, one.choices[0].finish_reason) for one in chunks]


def whole_of(client: openai.OpenAI, question: Question, **parameters: Any) -> Piece:
    """The same in one piece."""
    if question.chat:
        (choice,) = client.chat.completions.create(model=MODEL, messages=ask(question), **parameters).choices
        return Piece(choice.message.content, choice.finish_reason)
    (choice,) = client.completions.create(model=MODEL, prompt=question.text, **parameters).choices
    return Piece(choice.text, choice.finish_reason)


def joined(pieces: Sequence[Piece]) -> Piece:
    *earlier, last = pieces
    assert {piece.finish_reason for piece in earlier} <= {None}
    return Piece("".join(piece.text for piece in pieces), last.finish_reason)


BOTH = pytest.mark.parametrize("question", [COUNTING, SMILEY], ids=["completion", "chat"])


@pytest.mark.thorough
class TestSampling:
    """Thorough: see `test_a_service_of_a_tiny_model_answers_as_one_process_does` of this file."""

    @pytest.mark.parametrize("question", [STORY, SMILEY], ids=["completion", "chat"])
    def test_a_seed_gives_what_one_process_draws(
        self, client: openai.OpenAI, alone: Alone, smollm2: tuple[Path, Greedy], question: Question
    ) -> None:
        """Also the first token, which the prefill worker draws, and whichever workers the answer comes from."""
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=7)
        tokens = uvloop.run(tokens_alone(smollm2[0], [question], 12, sampling))[question]
        right = TextStream(alone.tokenizer, tokens).text
        assert right != alone(question, 12)
        parameters = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 12}
        assert {whole_of(client, question, **parameters).text for _ in range(3)} == {right}
        assert joined(pieces_of(client, question, **parameters)).text == right

    def test_other_seeds_and_none_give_other_answers(self, client: openai.OpenAI) -> None:
        parameters = {"temperature": 1.5, "max_tokens": 12}
        seeded = {whole_of(client, STORY, seed=seed, **parameters).text for seed in range(4)}
        assert len(seeded | {whole_of(client, STORY, **parameters).text for _ in range(4)}) == 8

    def test_a_temperature_of_zero_is_greedy(self, client: openai.OpenAI, alone: Alone) -> None:
        answer = whole_of(client, FRANCE, temperature=0, top_p=0.5, seed=3, max_tokens=8)
        assert answer.text == alone(FRANCE, 8)


@pytest.mark.thorough
class TestStop:
    """Thorough: see `test_a_service_of_a_tiny_model_answers_as_one_process_does` of this file."""

    @BOTH
    @pytest.mark.parametrize("length", [1, 2, 5])
    def test_an_answer_ends_before_the_first_stop_string(
        self, running: Running, client: openai.OpenAI, alone: Alone, question: Question, length: int
    ) -> None:
        full = alone(question, 40)
        stop = full[len(full) // 2 :][:length]
        right = Piece(full[: full.index(stop)], "stop")
        stops = [stop, "no such text"]
        assert whole_of(client, question, stop=stops, max_tokens=40) == right
        assert whole_of(client, question, stop=stop, max_tokens=40) == right
        assert joined(pieces_of(client, question, stop=stops, max_tokens=40)) == right
        running.until_idle()

    def test_tokens_are_counted_up_to_the_stop_string(self, client: openai.OpenAI, alone: Alone) -> None:
        stop = alone(COUNTING, 40)[12:14]
        parameters = {"model": MODEL, "prompt": COUNTING.text, "max_tokens": 40, "stop": stop}
        usage = client.completions.create(**parameters).usage
        assert 1 < usage.completion_tokens < 30
        streamed = client.completions.create(**parameters, stream=True, stream_options={"include_usage": True})
        assert list(streamed)[-1].usage == usage

    @BOTH
    def test_what_only_begins_like_one_is_shown_in_the_end(
        self, client: openai.OpenAI, alone: Alone, question: Question
    ) -> None:
        full = alone(question, 10)
        stops = [full[-3:] + "!?", full[2:6] + "!?"]
        assert joined(pieces_of(client, question, stop=stops, max_tokens=10)) == Piece(full, "length")
        assert whole_of(client, question, stop=stops, max_tokens=10) == Piece(full, "length")


@pytest.mark.thorough
class TestOrdinaryClients:
    """What they send without wanting anything by it.

    Thorough: see `test_a_service_of_a_tiny_model_answers_as_one_process_does` of this file.
    """

    NOTHING: ClassVar[dict[str, Any]] = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "me",
        "stop": None,
        "seed": None,
        "temperature": 0.0,
        "top_p": 1,
    }

    def test_a_chat(self, client: openai.OpenAI, alone: Alone) -> None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=ask(SUM),
            max_completion_tokens=60,
            response_format={"type": "text"},
            tools=[],
            tool_choice="none",
            parallel_tool_calls=True,
            metadata={"a": "b"},
            store=False,
            logprobs=False,
            modalities=["text"],
            service_tier="auto",
            stream_options={"include_usage": True},
            **self.NOTHING,
        )
        assert answer.choices[0].message.content == alone(SUM, 60)

    def test_a_completion(self, client: openai.OpenAI, alone: Alone) -> None:
        answer = client.completions.create(
            model=MODEL, prompt=[FRANCE.text], max_tokens=4, best_of=1, echo=False, suffix="", **self.NOTHING
        )
        assert answer.choices[0].text == alone(FRANCE, 4)

    def test_a_chat_of_parts(self, client: openai.OpenAI, alone: Alone) -> None:
        parts = [{"type": "text", "text": text} for text in (SUM.text[:7], SUM.text[7:])]
        messages = [{"role": "user", "content": parts}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=60, stream=None)
        assert answer.choices[0].message.content == alone(SUM, 60)

    @pytest.mark.parametrize(
        ("parameter", "value", "message"),
        [
            ("tools", [{"type": "function", "function": {"name": "f"}}], r"it takes null or \[\]"),
            ("response_format", {"type": "json_object"}, 'it takes null or {"type": "text"}'),
            ("logprobs", True, "it takes null or false"),
            ("logit_bias", {"50": 100}, "it takes null or {}"),
            ("presence_penalty", 0.5, "it takes null or 0"),
        ],
    )
    def test_what_would_change_the_answer_is_refused_by_name(
        self, client: openai.OpenAI, parameter: str, value: Any, message: str
    ) -> None:
        with pytest.raises(
            openai.BadRequestError, match=f"{parameter}: this server does not support it; {message}"
        ) as e:
            client.chat.completions.create(model=MODEL, messages=ask(SUM), **{parameter: value})
        assert (e.value.type, e.value.param) == ("invalid_request_error", parameter)

    def test_a_picture_is_refused_by_name(self, client: openai.OpenAI) -> None:
        picture = {"type": "image_url", "image_url": {"url": "data:,"}}
        with pytest.raises(openai.BadRequestError, match="reads text only, got a part of type 'image_url'") as caught:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [picture]}])
        assert caught.value.param == "messages.0.content"


@pytest.mark.thorough
class TestErrors:
    """Thorough: see `test_a_service_of_a_tiny_model_answers_as_one_process_does` of this file."""

    @pytest.mark.parametrize(
        ("wrong", "kind", "param", "message"),
        [
            ({"model": "gpt-7"}, openai.NotFoundError, "model", "'gpt-7' does not exist"),
            ({"prompt": ""}, openai.BadRequestError, "prompt", "at least one token"),
            ({"prompt": [1, 10**9]}, openai.BadRequestError, "prompt", "1000000000 is no token"),
            ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "greater than or equal to 1"),
            ({"max_tokens": 10**5}, openai.BadRequestError, None, "100001, at most 4096"),
            ({"temperature": 2.5}, openai.BadRequestError, "temperature", "less than or equal to 2"),
            ({"top_p": -0.1}, openai.BadRequestError, "top_p", "greater than or equal to 0"),
            ({"stop": ["a", "b", "c", "d", "e"]}, openai.BadRequestError, "stop", "at most 4 strings, got 5"),
            ({"n": 2}, openai.BadRequestError, "n", "does not support it; it takes null or 1"),
            ({"prompt": ["a", "b"]}, openai.BadRequestError, "prompt", "one prompt a request, got 2"),
            ({"extra_body": {"top_k": 5}}, openai.BadRequestError, "top_k", "does not support"),
            ({"extra_body": {"deadline_s": -1}}, openai.BadRequestError, "deadline_s", "greater than 0"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_what_cannot_be_right_is_refused(
        self,
        client: openai.OpenAI,
        wrong: Mapping[str, Any],
        kind: type[openai.APIStatusError],
        param: str | None,
        message: str,
    ) -> None:
        with pytest.raises(kind, match=message) as caught:
            client.completions.create(**{"model": MODEL, "prompt": "a", "max_tokens": 1} | dict(wrong))
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)

    def test_a_body_that_is_no_json_is_refused_too(self, running: Running) -> None:
        request = urllib.request.Request(f"{running.url}/v1/completions", data=b"{", method="POST")
        request.add_header("Content-Type", "application/json")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        error = json.load(caught.value)["error"]
        assert (caught.value.code, error["type"], error["param"]) == (400, "invalid_request_error", None)
        assert "JSON" in error["message"]

    @pytest.mark.parametrize(("worker", "path"), [("prefill-0", "prefill"), ("decode-0", "decode")])
    @pytest.mark.parametrize(
        ("body", "message"), [("{", "Invalid JSON"), ("{}", "request_id"), ('{"extra": 1}', "extra")]
    )
    def test_a_worker_refuses_what_is_no_message(
        self, running: Running, worker: str, path: str, body: str, message: str
    ) -> None:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{running.workers[worker]}/{path}", data=body.encode(), timeout=60)
        assert caught.value.code == 422
        assert message in caught.value.read().decode()
        assert running.health(worker)["runtime"] == "open"

    def test_an_unknown_path_is_an_error_in_the_same_shape(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.embeddings.create(model=MODEL, input="a")
        assert caught.value.type == "invalid_request_error"

    def test_a_deadline_ends_a_whole_answer(self, running: Running, client: openai.OpenAI) -> None:
        with pytest.raises(openai.APIStatusError, match="deadline has passed") as caught:
            client.completions.create(model=MODEL, prompt="a b", max_tokens=2000, extra_body={"deadline_s": 0.7})
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        running.until_idle()

    def test_a_deadline_ends_a_stream_that_has_begun(
        self, running: Running, client: openai.OpenAI, alone: Alone
    ) -> None:
        text, deadline_s = "", 1
        while not text:  # a host may be too slow for a first token within the deadline
            deadline_s *= 2
            with pytest.raises(openai.APIError, match="deadline has passed") as caught:
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
        assert running.metric("", 'openai_server_requests_total{outcome="client_gone"}') >= 1


@pytest.mark.thorough
class TestDeaths:
    """Thorough: see `test_a_service_of_a_tiny_model_answers_as_one_process_does` of this file."""

    def test_a_killed_prefill_worker_costs_no_answer(
        self, running: Running, client: openai.OpenAI, alone: Alone
    ) -> None:
        running.kill("prefill-0")
        answers = [client.completions.create(model=MODEL, prompt=FRANCE.text, max_tokens=4) for _ in range(3)]
        assert {answer.choices[0].text for answer in answers} == {alone(FRANCE, 4)}
        running.expect(r"prefill-0 died \(killed by SIGKILL\)")
        running.expect("router: prefill-0 is up")
        # The same name, but a new incarnation: decode workers shake hands with it again.
        answers = [client.completions.create(model=MODEL, prompt=FRANCE.text, max_tokens=4) for _ in range(4)]
        assert {answer.choices[0].text for answer in answers} == {alone(FRANCE, 4)}
        assert running.metric("prefill-0", 'openai_server_leases_total{outcome="read"}') >= 1

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
                return text, error.code
            return text, None

        def whole() -> str:
            answer = client.completions.create(model=MODEL, prompt=COUNTING.text, max_tokens=40)
            text: str = answer.choices[0].text
            return text

        right = alone(COUNTING, 40)
        begun, pid = threading.Semaphore(0), running.health("decode-0")["pid"]
        with ThreadPoolExecutor() as threads:
            # First the one kind, then the other: both decode workers have one of each.
            streams = [threads.submit(stream) for _ in range(2)]
            for _ in streams:
                assert begun.acquire(timeout=60)
            os.kill(pid, signal.SIGSTOP)  # before it is through with its stream
            wholes = [threads.submit(whole) for _ in range(2)]
            os.kill(pid, signal.SIGKILL)
            outcomes = sorted((future.result() for future in streams), key=lambda outcome: outcome[1] or "")
            assert [future.result() for future in wholes] == [right] * 2
        (complete, no_error), (cut, error) = outcomes
        assert (complete, no_error) == (right, None)
        assert error == "worker_lost"
        assert right.startswith(cut)
        assert cut != right
        running.expect("router: decode-0 is up")
        running.until_idle()


@pytest.mark.thorough
class TestLoad:
    """Thorough: see `test_a_service_of_a_tiny_model_answers_as_one_process_does` of this file."""

    def test_no_wrong_answer_while_a_worker_is_killed(
        self, running: Running, smollm2: tuple[Path, Greedy], one_thread: None
    ) -> None:
        right = uvloop.run(answers_alone(smollm2[0], ALL_QUESTIONS[:8], 8))
        service = Service(
            url=running.url,
            prefill={name: url for name, url in running.workers.items() if name.startswith("prefill")},
            decode={name: url for name, url in running.workers.items() if name.startswith("decode")},
        )
        load = LoadSettings(clients=12, requests=2, tokens=8, kill="decode")
        result = uvloop.run(put_load(service, load, right))
        assert (result.tally.wrong, result.tally.unclear) == ([], [])
        assert result.tally.ended == 24
        assert result.tally.right >= 12
        assert result.good


def test_the_median_is_read_from_a_histogram() -> None:
    assert quantile(Counter({1.0: 2, 2.0: 0, 4.0: 2}), 0.5) == pytest.approx(1.0)
    assert quantile(Counter({1.0: 1, 2.0: 3}), 0.5) == pytest.approx(1 + 1 / 3)
    with pytest.raises(ValueError, match="empty histogram"):
        quantile(Counter({1.0: 0}), 0.5)


def test_says_what_is_not_installed(run_python: RunPython) -> None:
    lines = (
        "import runpy, sys",
        "sys.modules['fastapi'] = None",
        f"sys.argv = ['server', 'serve']; runpy.run_path({str(SERVER)!r}, run_name='__main__')",
    )
    done = run_python("-c", "\n".join(lines))
    assert done.returncode == 2
    assert done.stderr.startswith("error: not installed: fastapi.")
