"""Concurrent clients of the example server. Their answers are compared with those of one engine without hand-overs.

A client may get an error that the server defines, but never a wrong answer, not even the beginning of one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from openai_server.failures import STATUS
from openai_server.worker import open_engine
from paged_engine import GREEDY, Sampling
from paged_engine.tokenizer import ChatTokenizer, TextStream
from paged_engine.weights import MODEL_NAME

BEGINNINGS = (
    "The capital of France is",
    "Once upon a time a fox",
    "The three primary colours are",
    "Water boils at",
    "def fibonacci(n):",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "The largest planet is",
)
QUESTIONS = (
    "Why is the sky blue?",
    "Name three rivers.",
    "What do cats eat?",
    "Who wrote Hamlet?",
    "What is 7 times 8?",
    "Say hello in French.",
    "What is a prime number?",
    "Name a colour.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt: a text to continue, or, for `chat`, a question to answer."""

    text: str
    chat: bool


ALL_QUESTIONS = tuple(
    Question(text=text, chat=chat)
    for pair in zip(BEGINNINGS, QUESTIONS, strict=True)
    for text, chat in zip(pair, (False, True), strict=True)
)


@dataclass(frozen=True, slots=True)
class Load:
    """Size of the test: each client makes `requests` requests one after another, for answers of `tokens` tokens."""

    clients: int
    requests: int
    tokens: int


@dataclass(slots=True)
class Tally:
    """Counts of the clients' results so far."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    unclear: list[str] = field(default_factory=list)
    """Errors that the server does not define."""
    seconds: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return self.right + len(self.wrong) + self.failed.total() + len(self.unclear)

    @property
    def good(self) -> bool:
        return not self.wrong and not self.unclear


async def run_clients(url: str, load: Load, right: Mapping[Question, str], tally: Tally) -> None:
    """Run all clients until their last answer."""
    async with asyncio.TaskGroup() as clients:
        for index in range(load.clients):
            clients.create_task(run_client(url, load, index, right, tally), name=f"client {index}")


async def run_client(url: str, load: Load, index: int, right: Mapping[Question, str], tally: Tally) -> None:
    """Ask one client's questions one after another, every second one as a stream."""
    questions = list(right)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for number in range(index, index + load.requests):
            question = questions[(number * 7) % len(questions)]
            await _ask(client, question, load.tokens, right[question], tally, stream=number % 2 == 0)


async def _ask(client: Any, question: Question, tokens: int, right: str, tally: Tally, *, stream: bool) -> None:
    """Ask one question, and add the result to `tally`."""
    create = client.chat.completions.create if question.chat else client.completions.create
    asked = {"messages": [{"role": "user", "content": question.text}]} if question.chat else {"prompt": question.text}
    began_s = time.monotonic()
    text = ""
    try:
        answer = await create(model=MODEL_NAME, max_tokens=tokens, stream=stream, **asked)
        if stream:
            async for piece in answer:
                if not text:
                    tally.first_token_s.append(time.monotonic() - began_s)
                text += (piece.choices[0].delta.content or "") if question.chat else piece.choices[0].text
        else:
            text = answer.choices[0].message.content if question.chat else answer.choices[0].text
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


async def tokens_alone(
    checkpoint: Path, questions: Sequence[Question], max_tokens: int, sampling: Sampling = GREEDY
) -> dict[Question, list[int]]:
    """Return the tokens of each answer, by one engine in this process, on one thread."""
    tokenizer = ChatTokenizer(checkpoint)
    async with open_engine("alone", checkpoint) as engine:

        async def answer(question: Question) -> list[int]:
            encode = tokenizer.encode_chat if question.chat else tokenizer.encode_text
            generating = engine.generate(encode(question.text), max_tokens=max_tokens, sampling=sampling)
            async with aclosing(generating) as generated:
                return [token async for token in generated]

        return dict(zip(questions, await asyncio.gather(*map(answer, questions)), strict=True))


async def answers_alone(checkpoint: Path, questions: Sequence[Question], max_tokens: int) -> dict[Question, str]:
    """Return the text of each answer, by one engine in this process."""
    tokenizer = ChatTokenizer(checkpoint)
    tokens = await tokens_alone(checkpoint, questions, max_tokens)
    return {question: TextStream(tokenizer, token_ids).text for question, token_ids in tokens.items()}
