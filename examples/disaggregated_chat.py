"""A chat: one engine computes the prompt, another generates the answer, each in processes of its own.

    python examples/disaggregated_chat.py --prompt "Why is the sky blue?"
    python examples/disaggregated_chat.py --model sliding-window
    python examples/disaggregated_chat.py --prefill-tp 2 --decode-tp 1 --decode-tp 4

This process is the router. It asks the prefill engine for the prompt and gets a ticket. It passes the ticket to the
decode engine, which loads the prompt's KV cache and its first token through kvflow, and goes on from there. The decode
engine never sees the prompt, so each right word of its answer proves the hand-over. The prompt is handed over a second
time, when the engines are already connected. All answers must be equal to the answer of a single engine.

Each rank of an engine is a process with its part of the weights, the cache of its own KV heads, and its own kvflow
runtime. Every prefill rank offers its part of the prompt's blocks, the router merges the offers into one ticket, and
every decode rank loads the heads that it needs from the prefill ranks that hold them. SmolLM2 has three KV heads, which
two or four ranks cannot divide, so these engines pad them to four (`paged_engine.sharding`).

Exit codes: 0 the texts are equal, 1 one differs, 2 something failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from disaggregated.engines import EngineProcesses, start_engine
from disaggregated.example import run_example, unpacked_model
from disaggregated.hand_over import HandOver, answer_alone, hand_over
from disaggregated.worker import Loaded, WorkerSettings
from paged_engine import blocks_for
from paged_engine.sharding import WHOLE, Shard, divisible_kv_heads
from paged_engine.tokenizer import ChatTokenizer, TextStream
from paged_engine.weights import MODEL_NAME, read_config

MODELS = {"smollm2": {}, "sliding-window": {"window": 32, "full_attention_every": 6}}
DEFAULT_PROMPT = (
    "A ferry crosses the fjord every morning, and every morning the same dog waits at the pier for it. "
    "Tell me what the dog is waiting for."
)
# About 90 MiB per engine: 30 layers, K and V, 3 heads of 64 float32 values for each token.
CACHE_TOKENS = 2048


async def chat(options: argparse.Namespace, checkpoint: Path) -> bool:
    """Start all engines, answer with and without hand-overs, and report. Return True if all answers are equal."""
    tokenizer = ChatTokenizer(checkpoint)
    prompt, max_tokens = tokenizer.encode_chat(options.prompt), options.tokens
    sizes = {f"prefill-tp{options.prefill_tp}": options.prefill_tp}
    sizes |= {f"decode-tp{tp_size}": tp_size for tp_size in options.decode_tp or (1,)}
    kv_heads = read_config(checkpoint).kv_head_count
    padded = divisible_kv_heads(kv_heads, sizes.values())
    print_heads(sizes, kv_heads, padded)
    shards = {name: Shard(tp_size=tp_size, kv_head_count=padded) for name, tp_size in sizes.items()} | {"single": WHOLE}
    engines: list[EngineProcesses] = []
    answers: list[list[int]] = []
    async with AsyncExitStack() as stack:
        for engine_id, shard in shards.items():
            settings = WorkerSettings(
                engine_id=engine_id,
                checkpoint=checkpoint,
                block_size=options.block_size,
                block_count=blocks_for(CACHE_TOKENS, options.block_size),
                shard=shard,
            )
            engines.append(await stack.enter_async_context(start_engine(settings)))
        print("\nstarting the engines", flush=True)
        for engine in engines:
            await engine.ready()
        print(f"\nyou: {options.prompt}")
        prefill, *decodes, single = engines
        for decode in decodes:
            # The first load between two engines connects them; the second shows a hand-over without that.
            hand_overs = [
                await hand_over(
                    prefill,
                    decode,
                    request_id=f"{decode.engine_id} {nth}",
                    prompt=prompt,
                    max_tokens=max_tokens,
                    show=show,
                )
                for nth, show in (("first", printer(tokenizer, decode.engine_id)), ("second", None))
            ]
            print_loads(prefill.engine_id, decode.engine_id, len(prompt), hand_overs)
            answers += [one.token_ids for one in hand_overs]
        alone = await answer_alone(single, prompt, max_tokens)
    same = all(answer == alone for answer in answers)
    if same:
        print(f"\nsame text: {len(alone)} tokens equal to a single engine's, without hand-over")
    else:
        print(f"\nDIFFERENT TEXT: without hand-over a single engine says\n{tokenizer.decode(alone)}")
    return same


def printer(tokenizer: ChatTokenizer, name: str) -> Callable[[int], None]:
    """Return a function that prints the text of an answer, token by token."""
    stream = TextStream(tokenizer)
    print(f"\n{name}: ", end="", flush=True)

    def show(token: int) -> None:
        before = len(stream.text)
        print(stream.push(token)[before:], end="", flush=True)

    return show


def print_heads(sizes: Mapping[str, int], kv_heads: int, padded: int) -> None:
    """Print which rank holds which KV heads."""
    heads = [str(head) if head < kv_heads else "padding" for head in range(padded)]
    print("\nThe KV heads of each rank.")
    for engine_id, tp_size in sizes.items():
        each = padded // tp_size
        ranks = (f"rank {rank}: {' '.join(heads[rank * each :][:each])}" for rank in range(tp_size))
        print(f"{engine_id}  {'; '.join(ranks)}")


def print_loads(prefill: str, decode: str, prompt_count: int, hand_overs: Sequence[HandOver]) -> None:
    """Print kvflow's reports of the loads of each decode rank, and how their leases ended."""
    by_rank = list(zip(*(one.loaded for one in hand_overs), strict=True))
    loads = [load for of_rank in by_rank for load in of_rank]
    reports = [load.report for load in loads]
    rows = [
        ["", *(f"rank {rank}, {nth}" for rank in range(len(by_rank)) for nth in ("first", "second"))],
        ["read from ranks", *(" ".join(re.findall(r"\btp (\d+)\)", str(one.sources))) or "0" for one in reports)],
        ["prompt tokens", *(f"{prompt_count:,}" for _ in loads)],
        ["blocks", *(f"{one.blocks:,}" for one in reports)],
        ["bytes", *(f"{one.bytes:,}" for one in reports)],
        ["blocks before windows, not moved", *(f"{load.blocks_left:,}" for load in loads)],
        ["bytes before windows, not moved", *(f"{load.bytes_left:,}" for load in loads)],
        ["descriptors", *(f"{one.descriptors:,}" for one in reports)],
        *([phase, *(f"{one.seconds[phase] * 1e3:,.2f} ms" for one in reports)] for phase in reports[0].seconds),
        ["total", *(f"{one.total_s * 1e3:,.2f} ms" for one in reports)],
        # Both phases count, because over shared memory NIXL copies in post.
        ["post + wire", *(rate(load, load.report.seconds["post"] + load.report.seconds["wire"]) for load in loads)],
        ["all phases", *(rate(load, load.report.total_s) for load in loads)],
    ]
    print(f"\n\n{prefill} to {decode}: the first loads connect the engines.")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"The leases ended as {', '.join(outcome for one in hand_overs for outcome in one.outcomes)}.")


def rate(loaded: Loaded, seconds: float) -> str:
    return f"{loaded.report.bytes / seconds / 1e9:.3f} GB/s" if seconds else "-"


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers for argparse, which refuses numbers below `least`."""

    def count(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return count


def run(options: argparse.Namespace) -> bool:
    print(f"{MODEL_NAME}, float32, greedy, NIXL over {options.transport}")
    with unpacked_model(options.checkpoint, **MODELS[options.model]) as checkpoint:
        return asyncio.run(chat(options, checkpoint))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="SmolLM2 in several processes: one computes the prompt, kvflow moves its KV cache, another answers."
    )
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to ask")
    # The prefill engine computes the first token, so only an answer of two tokens or more proves a hand-over.
    parser.add_argument("--tokens", type=at_least(2), default=48, help="length of the answer (default: 48)")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens per block (default: 16)")
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm", help="for NIXL (default: shm)")
    what = "sliding-window: five of six layers attend to the last 32 tokens, for which it was not trained"
    parser.add_argument("--model", choices=tuple(MODELS), default="smollm2", help=what)
    parser.add_argument("--checkpoint", type=Path, help="an unpacked model (default: unpack SmolLM2)")
    parser.add_argument("--prefill-tp", type=at_least(1), default=1, help="ranks of the prefill engine (default: 1)")
    what = "ranks of a decode engine, once for each engine (default: one of 1)"
    parser.add_argument("--decode-tp", type=at_least(1), action="append", help=what)
    options = parser.parse_args()
    return run_example(lambda: run(options), transport=options.transport)


if __name__ == "__main__":
    sys.exit(main())
