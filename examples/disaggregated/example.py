"""Shared parts of the example programs: options, the unpacked model, the engines' settings, output, exit codes.

Exit codes: 0 the texts are equal, 1 they differ, 2 something failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paged_engine import blocks_for
from paged_engine.sharding import WHOLE, Shard
from paged_engine.tokenizer import ChatTokenizer, TextStream
from paged_engine.weights import (
    MODEL_NAME,
    REQUIRED_MODULES,
    MissingPackageError,
    require_modules,
    write_checkpoint,
)
from paged_engine.windowed import WINDOWED_NAME, write_windowed

from disaggregated.engines import WorkerError
from disaggregated.worker import Loaded, WorkerSettings

DEFAULT_PROMPT = (
    "A ferry crosses the fjord every morning, and every morning the same dog waits at the pier for it. "
    "Tell me what the dog is waiting for."
)
# About 90 MiB per engine: 30 layers, K and V, 3 heads of 64 float32 values for each token.
CACHE_TOKENS = 2048


def options_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options common to all examples."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to ask")
    # The prefill engine computes the first token, so only an answer of two tokens or more proves a hand-over.
    parser.add_argument("--tokens", type=at_least(2), default=48, help="length of the answer (default: 48)")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens per block (default: 16)")
    parser.add_argument(
        "--transport", choices=("shm", "tcp"), default="shm", help="what NIXL moves it over (default: shm)"
    )
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers for argparse, which refuses numbers below `least`."""

    def count(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return count


MODELS = {"smollm2": (MODEL_NAME, write_checkpoint), "sliding-window": (WINDOWED_NAME, write_windowed)}
"""Models by their name for `--model`: the model's full name, and the function that writes its files."""


@contextmanager
def unpacked_model(model: str = "smollm2") -> Iterator[Path]:
    """Unpack a model once for all processes, and yield the folder of its files. Delete them at the end of the block."""
    name, write = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="kvflow-example-") as directory:
        checkpoint = Path(directory)
        print(f"unpacking {name}, some seconds", flush=True)
        write(checkpoint)
        yield checkpoint


def engine_settings(engine_id: str, checkpoint: Path, block_size: int, shard: Shard = WHOLE) -> WorkerSettings:
    """Return the settings of an engine with room for some conversations."""
    return WorkerSettings(
        engine_id=engine_id,
        checkpoint=checkpoint,
        block_size=block_size,
        block_count=blocks_for(CACHE_TOKENS, block_size),
        shard=shard,
    )


def set_worker_environment(transport: str) -> None:
    """Set the environment variables that NIXL and UCX read in the workers, which inherit them.

    `transport` is "tcp" or "shm". For shm UCX_TLS is unset: by default UCX uses shared memory between local processes.
    """
    os.environ |= {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}
    if transport == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    else:
        os.environ.pop("UCX_TLS", None)


class PrintedAnswer:
    """Prints an answer as its tokens come."""

    def __init__(self, tokenizer: ChatTokenizer, name: str) -> None:
        self._stream = TextStream(tokenizer)
        print(f"\n{name}: ", end="", flush=True)

    def show(self, token: int) -> None:
        before = len(self._stream.text)
        print(self._stream.push(token)[before:], end="", flush=True)


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_verdict(alone: str, reference: str, token_count: int, *, same: bool) -> None:
    """Print whether the texts are equal. `reference` is the answer of `alone`, without a hand-over."""
    if same:
        print(f"\nsame text: {token_count} tokens equal to {alone}'s own, without hand-over")
    else:
        print(f"\nDIFFERENT TEXT: without hand-over {alone} says\n{reference}")


def wire_rate(loaded: Loaded) -> str:
    """Return the rate over the phases post and wire. Both count, because over shared memory NIXL copies in post."""
    seconds = loaded.report.seconds
    return rate(loaded, seconds["post"] + seconds["wire"])


def rate(loaded: Loaded, seconds: float) -> str:
    return f"{loaded.report.bytes / seconds / 1e9:.3f} GB/s" if seconds else "-"


def run_example(run: Callable[[], bool], *, transport: str) -> int:
    """Call `run`, and return an exit code: 0 or 1 by its result, 2 for an error, 130 if interrupted."""
    set_worker_environment(transport)
    try:
        require_modules(*REQUIRED_MODULES)
        return 0 if run() else 1
    except (MissingPackageError, WorkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
