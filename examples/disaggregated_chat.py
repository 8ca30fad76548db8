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

import argparse
import asyncio
import sys
from pathlib import Path

from disaggregated.engines import start_engine
from disaggregated.example import (
    MODELS,
    PrintedAnswer,
    engine_settings,
    options_parser,
    print_table,
    print_verdict,
    rate,
    run_example,
    unpacked_model,
    wire_rate,
)
from disaggregated.hand_over import answer_alone, hand_over
from disaggregated.worker import Loaded
from paged_engine.tokenizer import ChatTokenizer

PREFILL, DECODE = "prefill-0", "decode-0"


async def chat(options: argparse.Namespace, checkpoint: Path) -> bool:
    """Start both engines, answer with and without a hand-over, and report. Return True if the answers are equal."""
    tokenizer = ChatTokenizer(checkpoint)
    prompt, max_tokens = tokenizer.encode_chat(options.prompt), options.tokens
    async with (
        start_engine(engine_settings(PREFILL, checkpoint, options.block_size)) as prefill,
        start_engine(engine_settings(DECODE, checkpoint, options.block_size)) as decode,
    ):
        print("starting the engines", flush=True)
        await prefill.ready()
        await decode.ready()
        print(f"\nyou: {options.prompt}")
        answer = PrintedAnswer(tokenizer, options.model)
        first = await hand_over(
            prefill, decode, request_id="chat-1", prompt=prompt, max_tokens=max_tokens, show=answer.show
        )
        # The first load between two engines connects them; the second shows the time of a hand-over without that.
        second = await hand_over(prefill, decode, request_id="chat-2", prompt=prompt, max_tokens=max_tokens)
        alone = await answer_alone(decode, prompt, max_tokens)
    report(len(prompt), [*first.loaded, *second.loaded], [*first.outcomes, *second.outcomes])
    same = alone == first.token_ids == second.token_ids
    print_verdict(DECODE, tokenizer.decode(alone), len(alone), same=same)
    return same


def report(prompt_count: int, loads: list[Loaded], outcomes: list[str]) -> None:
    """Print kvflow's reports of both loads, and how their leases ended."""
    reports = [load.report for load in loads]
    rows = [
        ["", "first load", "second load"],
        ["prompt tokens", *(f"{prompt_count:,}" for _ in loads)],
        ["blocks", *(f"{one.blocks:,}" for one in reports)],
        ["bytes", *(f"{one.bytes:,}" for one in reports)],
        ["blocks before windows, not moved", *(f"{load.blocks_left:,}" for load in loads)],
        ["bytes before windows, not moved", *(f"{load.bytes_left:,}" for load in loads)],
        ["descriptors", *(f"{one.descriptors:,}" for one in reports)],
        ["lease", *outcomes],
        *([phase, *(f"{one.seconds[phase] * 1e3:,.2f} ms" for one in reports)] for phase in reports[0].seconds),
        ["total", *(f"{one.total_s * 1e3:,.2f} ms" for one in reports)],
        ["post + wire", *map(wire_rate, loads)],
        ["all phases", *(rate(load, load.report.total_s) for load in loads)],
    ]
    print_table("\nThe hand-over. The first load connects the engines.", rows)


def run(options: argparse.Namespace) -> bool:
    """Run the chat. Return True if the answers are equal."""
    name, _ = MODELS[options.model]
    print(f"{name}, float32, greedy: {PREFILL} hands over to {DECODE}, NIXL over {options.transport}")
    with unpacked_model(options.model) as checkpoint:
        return asyncio.run(chat(options, checkpoint))


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
    options = parser.parse_args()
    return run_example(lambda: run(options), transport=options.transport)


if __name__ == "__main__":
    sys.exit(main())
