"""What the load test asks, and the right answers: those of one engine that does everything by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch
from paged_engine import Engine, blocks_for
from paged_engine.tokenizer import ChatTokenizer, TextStream
from paged_engine.weights import load_model

from openai_server.worker import BATCH_SIZE, BLOCK_SIZE, CACHE_TOKENS

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


async def answers_alone(checkpoint: Path, questions: Sequence[Question], tokens: int) -> dict[Question, str]:
    """The answer to each question, from an engine in this process."""
    torch.set_num_threads(1)  # as workers do: one thread gives the same sums everywhere
    tokenizer = ChatTokenizer(checkpoint)
    async with Engine(
        load_model(checkpoint),
        block_count=blocks_for(CACHE_TOKENS, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        batch_size=BATCH_SIZE,
    ) as engine:

        async def answer(question: Question) -> str:
            encode = tokenizer.encode_chat if question.chat else tokenizer.encode_text
            async with aclosing(engine.generate(encode(question.text), max_tokens=tokens)) as generated:
                return TextStream(tokenizer, [token async for token in generated]).text

        return dict(zip(questions, await asyncio.gather(*map(answer, questions)), strict=True))
