"""What the example programs share: options, the unpacked model, the engines' settings, exit codes.

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
# Per engine some 90 MiB: 30 layers, K and V, 3 heads of 64 float32 values for each token.
CACHE_TOKENS = 2048


def options_parser(description: str) -> argparse.ArgumentParser:
    """The options that every example takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="what to ask")
    # The first token is the prefill engine's, so an answer that proves something has two.
    parser.add_argument("--tokens", type=at_least(2), default=48, help="length of the answer (default: 48)")
    parser.add_argument("--block-size", type=at_least(1), default=16, help="tokens per block (default: 16)")
    parser.add_argument(
        "--transport", choices=("shm", "tcp"), default="shm", help="what NIXL moves it over (default: shm)"
    )
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not too small, for argparse."""

    def count(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return count


MODELS = {"smollm2": (MODEL_NAME, write_checkpoint), "sliding-window": (WINDOWED_NAME, write_windowed)}
"""By what `--model` calls them: the name, and who writes the files."""


@contextmanager
def unpacked_model(screen: Screen, model: str = "smollm2") -> Iterator[Path]:
    """The model's files for as long as the `with`, unpacked once for all processes."""
    name, write = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="kvflow-example-") as directory:
        checkpoint = Path(directory)
        with screen.busy(f"unpacking {name}, some seconds"):
            write(checkpoint)
        yield checkpoint


def engine_settings(engine_id: str, checkpoint: Path, block_size: int, shard: Shard = WHOLE) -> WorkerSettings:
    """An engine with room for some conversations."""
    return WorkerSettings(
        engine_id=engine_id,
        checkpoint=checkpoint,
        block_size=block_size,
        block_count=blocks_for(CACHE_TOKENS, block_size),
        shard=shard,
    )


def run_example(run: Callable[[Screen], bool], *, transport: str) -> int:
    """Run it with a screen; its answer, or what went wrong, as an exit code."""
    try:
        require_modules("rich", *REQUIRED_MODULES)
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Imported late because it needs rich, which may be what is missing.
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
