"""Shared parts of the example programs: options, the unpacked model, the engines' settings, exit codes.

Exit codes: 0 the texts are equal, 1 they differ, 2 something failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paged_engine import blocks_for
from paged_engine.sharding import WHOLE, Shard
from paged_engine.weights import (
    MODEL_NAME,
    REQUIRED_MODULES,
    MissingPackageError,
    require_modules,
    write_checkpoint,
)
from paged_engine.windowed import WINDOWED_NAME, write_windowed

from disaggregated.router import WorkerError, set_worker_environment
from disaggregated.worker import WorkerSettings

if TYPE_CHECKING:
    from disaggregated.screen import Screen

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
def unpacked_model(screen: Screen, model: str = "smollm2") -> Iterator[Path]:
    """Unpack a model once for all processes, and yield the folder of its files. Delete them at the end of the block."""
    name, write = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="kvflow-example-") as directory:
        checkpoint = Path(directory)
        with screen.busy(f"unpacking {name}, some seconds"):
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


def run_example(run: Callable[[Screen], bool], *, transport: str) -> int:
    """Call `run` with a screen, and return an exit code: 0 or 1 by its result, 2 for an error, 130 if interrupted."""
    try:
        require_modules("rich", *REQUIRED_MODULES)
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Imported here because it needs rich, which may be missing.
    from disaggregated.screen import Screen

    screen = Screen()
    set_worker_environment(transport)
    try:
        return 0 if run(screen) else 1
    except WorkerError as error:
        screen.error(str(error))
        return 2
    except KeyboardInterrupt:
        screen.error("interrupted")
        return 130
