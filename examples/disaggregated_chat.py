"""A chat whose prompt is computed in one process and whose answer is generated in another.

    python examples/disaggregated_chat.py --prompt "Why is the sky blue?"

This process is the router. It asks the prefill engine to compute the prompt and gets the first token and a
ticket; it hands both to the decode engine, which loads the prompt's KV cache through kvflow and goes on from
there. The decode engine never sees the prompt, so every right word it says proves the hand-over. Then the
same engine answers the prompt all alone, and the two answers must be equal.

Exit codes: 0 the texts are equal, 1 they differ, 2 something failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from disaggregated.messages import Decode, Generate, Loaded, Prefill, Prefilled, Ready, Released
from disaggregated.router import WorkerError, WorkerProcess, set_worker_environment, start_worker
from disaggregated.worker import WorkerSettings
from paged_engine import blocks_for
from paged_engine.tokenizer import ChatTokenizer, TextStream
from paged_engine.weights import (
    MODEL_NAME,
    REQUIRED_MODULES,
    MissingPackageError,
    require_modules,
    write_checkpoint,
)

if TYPE_CHECKING:
    from disaggregated.screen import Screen

DEFAULT_PROMPT = (
    "A ferry crosses the fjord every morning, and every morning the same dog waits at the pier for it. "
    "Tell me what the dog is waiting for."
)
# Per engine some 90 MiB: 30 layers, K and V, 3 heads of 64 float32 values for each token.
CACHE_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    prompt: str
    tokens: int
    block_size: int
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """An answer that two engines gave together, and how the KV cache went from one to the other."""

    token_ids: list[int]
    loaded: Loaded
    outcome: str


async def hand_over(
    prefill: WorkerProcess,
    decode: WorkerProcess,
    prompt: list[int],
    max_tokens: int,
    show: Callable[[int], None],
) -> HandOver:
    """What a router does for each request: prompt to the one, ticket to the other, tokens to the user."""
    request_id = "chat-1"
    await prefill.send(Prefill(request_id=request_id, prompt=prompt))
    prefilled = await prefill.expect(Prefilled)
    show(prefilled.token)
    await decode.send(
        Decode(
            request_id=request_id,
            prompt_count=len(prompt),
            token=prefilled.token,
            ticket=prefilled.ticket,
            max_tokens=max_tokens - 1,
        )
    )
    loaded = await decode.expect(Loaded)
    token_ids = [prefilled.token]
    async with aclosing(decode.tokens()) as tokens:
        async for token in tokens:
            token_ids.append(token)
            show(token)
    released = await prefill.expect(Released)
    return HandOver(token_ids=token_ids, loaded=loaded, outcome=released.outcome)


async def answer_alone(engine: WorkerProcess, prompt: list[int], max_tokens: int) -> list[int]:
    """The same engine's answer without hand-over."""
    await engine.send(Generate(prompt=prompt, max_tokens=max_tokens))
    async with aclosing(engine.tokens()) as tokens:
        return [token async for token in tokens]


async def chat(options: Options, checkpoint: Path, screen: Screen) -> bool:
    """Start both engines, answer with and without hand-over, report; whether the answers are equal."""
    tokenizer = ChatTokenizer(checkpoint)
    prompt = tokenizer.encode_chat(options.prompt)
    async with (
        start_worker(worker_settings("prefill-0", options, checkpoint)) as prefill,
        start_worker(worker_settings("decode-0", options, checkpoint)) as decode,
    ):
        with screen.busy("starting the engines"):
            await prefill.expect(Ready)
            await decode.expect(Ready)
        screen.prompt(options.prompt)
        stream = TextStream(tokenizer)
        with screen.answer() as answer:
            handed_over = await hand_over(
                prefill, decode, prompt, options.tokens, lambda token: answer.show(stream.push(token))
            )
        screen.hand_over(handed_over.loaded, prompt_count=len(prompt), outcome=handed_over.outcome)
        with screen.busy("decode-0 answers the same prompt all alone"):
            alone = await answer_alone(decode, prompt, options.tokens)
    reference = tokenizer.decode(alone)
    same = alone == handed_over.token_ids and reference == stream.text
    screen.verdict(same=same, token_count=len(alone), reference=reference)
    return same


def worker_settings(engine_id: str, options: Options, checkpoint: Path) -> WorkerSettings:
    return WorkerSettings(
        engine_id=engine_id,
        checkpoint=checkpoint,
        block_size=options.block_size,
        block_count=blocks_for(CACHE_TOKENS, options.block_size),
    )


def run(options: Options, screen: Screen) -> int:
    """Unpack the model once for all processes, and chat; the exit code."""
    set_worker_environment(options.transport)
    screen.header(model=MODEL_NAME, transport=options.transport)
    with tempfile.TemporaryDirectory(prefix="kvflow-chat-") as directory:
        checkpoint = Path(directory)
        with screen.busy("unpacking the weights, some 15 seconds"):
            write_checkpoint(checkpoint)
        same = asyncio.run(chat(options, checkpoint, screen))
    return 0 if same else 1


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description="SmolLM2 in two processes: one computes the prompt, kvflow moves its KV cache, the other answers."
    )
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to ask")
    # The first token is the prefill engine's, so an answer that proves something has two.
    parser.add_argument("--tokens", type=at_least(2), default=48, help="length of the answer (default: 48)")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens per block (default: 16)")
    parser.add_argument(
        "--transport", choices=("shm", "tcp"), default="shm", help="what NIXL moves it over (default: shm)"
    )
    return Options(**vars(parser.parse_args()))


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not too small, for argparse."""

    def count(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return count


def main() -> int:
    options = parse_options()
    try:
        require_modules("rich", *REQUIRED_MODULES)
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Imported late because it needs rich, which may be what is missing.
    from disaggregated.screen import Screen

    screen = Screen()
    try:
        return run(options, screen)
    except WorkerError as error:
        screen.error(str(error))
        return 2
    except KeyboardInterrupt:
        screen.error("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
