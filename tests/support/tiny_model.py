"""The prompt that the tests of the examples use, and the reference for its answers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 33, 71]

RunPython = Callable[..., subprocess.CompletedProcess[str]]


class Model(NamedTuple):
    """A checkpoint for the examples' engine, and the greedy answers of transformers, without the prompt."""

    checkpoint: Path
    greedy: Callable[[Sequence[int], int], list[int]]
