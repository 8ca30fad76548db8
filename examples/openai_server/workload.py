"""What the load test asks, and the right answers: those of one engine that does everything by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from paged_engine import GREEDY, Sampling
from paged_engine.tokenizer import ChatTokenizer, TextStream

from openai_server.worker import open_engine

BEGINNINGS = (
    "The capital of France is",
    "Once upon a time a fox",
    "The three primary colours are",
    "Water boils at",
    "def fibonacci(n):",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "The largest planet is",
    "In the beginning",
    "My favourite song is",
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
    "What is the moon made of?",
    "How many legs has a spider?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A text to go on with, or a question to answer."""

    text: str
    chat: bool


ALL_QUESTIONS = tuple(
    Question(text=text, chat=chat)
    for pair in zip(BEGINNINGS, QUESTIONS, strict=True)
    for text, chat in zip(pair, (False, True), strict=True)
)


async def tokens_alone(
    checkpoint: Path, questions: Sequence[Question], max_tokens: int, sampling: Sampling = GREEDY
) -> dict[Question, list[int]]:
    """The tokens of the answer to each question, from one engine in this process; it takes one thread."""
    tokenizer = ChatTokenizer(checkpoint)
    async with open_engine("alone", checkpoint) as engine:

        async def answer(question: Question) -> list[int]:
            encode = tokenizer.encode_chat if question.chat else tokenizer.encode_text
            generating = engine.generate(encode(question.text), max_tokens=max_tokens, sampling=sampling)
            async with aclosing(generating) as generated:
                return [token async for token in generated]

        return dict(zip(questions, await asyncio.gather(*map(answer, questions)), strict=True))


async def answers_alone(checkpoint: Path, questions: Sequence[Question], max_tokens: int) -> dict[Question, str]:
    """The same as text."""
    tokenizer = ChatTokenizer(checkpoint)
    tokens = await tokens_alone(checkpoint, questions, max_tokens)
    return {question: TextStream(tokenizer, token_ids).text for question, token_ids in tokens.items()}
