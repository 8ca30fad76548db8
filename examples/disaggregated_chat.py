"""A chat: one process computes the prompt, another generates the answer.

    python examples/disaggregated_chat.py --prompt "Why is the sky blue?"
    python examples/disaggregated_chat.py --model sliding-window

This process is the router. It asks the prefill engine for the prompt and gets a ticket. It passes the ticket to the
decode engine, which loads the prompt's KV cache and its first token through kvflow, and goes on from there. The decode
engine never sees the prompt, so each right word of its answer proves the hand-over. The prompt is handed over a second
time, when the engines are already connected. Then the decode engine answers the prompt alone, and all answers must be
equal.

Exit codes: 0 the texts are equal, 1 they differ, 2 something failed, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from disaggregated.engines import start_engine
from disaggregated.example import MODELS, engine_settings, options_parser, run_example, unpacked_model
from disaggregated.hand_over import answer_alone, hand_over
from disaggregated.messages import Ready
from paged_engine.tokenizer import ChatTokenizer, TextStream

if TYPE_CHECKING:
    from disaggregated.screen import Screen

PREFILL = "prefill-0"
DECODE = "decode-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command line."""

    model: str
    prompt: str
    tokens: int
    block_size: int
    transport: str


async def chat(options: Options, checkpoint: Path, screen: Screen) -> bool:
    """Start both engines, answer with and without a hand-over, and report. Return True if the answers are equal."""
    tokenizer = ChatTokenizer(checkpoint)
    prompt = tokenizer.encode_chat(options.prompt)
    async with (
        start_engine(engine_settings(PREFILL, checkpoint, options.block_size)) as prefill,
        start_engine(engine_settings(DECODE, checkpoint, options.block_size)) as decode,
    ):
        with screen.busy("starting the engines"):
            await prefill.expect(Ready)
            await decode.expect(Ready)
        screen.prompt(options.prompt)
        stream = TextStream(tokenizer)
        with screen.answer(PREFILL, DECODE) as answer:
            handed_over = await hand_over(
                prefill,
                decode,
                request_id="chat-1",
                prompt=prompt,
                max_tokens=options.tokens,
                show=lambda token: answer.show(stream.push(token)),
            )
        # The first load between two engines connects them; the second shows the time of a hand-over without that.
        again = await hand_over(
            prefill, decode, request_id="chat-2", prompt=prompt, max_tokens=options.tokens, show=lambda _: None
        )
        same_again = again.token_ids == handed_over.token_ids
        screen.hand_over(handed_over.loaded[0], again.loaded[0], prompt_count=len(prompt), outcome=again.outcomes[0])
        with screen.busy(f"{DECODE} answers the same prompt all alone"):
            alone = await answer_alone(decode, prompt, options.tokens)
    reference = tokenizer.decode(alone)
    same = same_again and alone == handed_over.token_ids and reference == stream.text
    screen.verdict(same=same, token_count=len(alone), alone=DECODE, reference=reference)
    return same


def run(options: Options, screen: Screen) -> bool:
    """Run the chat. Return True if the answers are equal."""
    name, _ = MODELS[options.model]
    screen.header("disaggregated chat", model=name, prefill=PREFILL, decode=[DECODE], transport=options.transport)
    with unpacked_model(screen, options.model) as checkpoint:
        return asyncio.run(chat(options, checkpoint, screen))


def main() -> int:
    parser = options_parser(
        "SmolLM2 in two processes: one computes the prompt, kvflow moves its KV cache, the other answers."
    )
    parser.add_argument(
        "--model",
        choices=tuple(MODELS),
        default="smollm2",
        help="sliding-window: a tiny random model most of whose layers attend to a window (default: smollm2)",
    )
    options = Options(**vars(parser.parse_args()))
    return run_example(lambda screen: run(options, screen), transport=options.transport)


if __name__ == "__main__":
    sys.exit(main())
