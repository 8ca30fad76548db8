"""Prompts with common beginnings, and the content of their tokens in a cache.

The content of a token depends on the salt and on all tokens up to this one, as in a real cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvflow.prefix.keys import prefix_keys
from tests.simulator.cache import TOKENS_MAX, Content

SPAN = 4
"""Number of tokens in a span. Prompts fork only between spans."""
PROMPT_MAX = 32
_SALTS = (b"", b"", b"tenant")
_FORKS = (8, 16)
_BRANCHES = 2
_FIRST_NUMBER = 1 << 12  # prompts that are not of this module have lower numbers

Path: TypeAlias = "tuple[bytes, tuple[int, ...]]"
"""A salt, and the first tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class SimPrompt:
    """A prompt that shares its beginning with other prompts, and its tokens with prompts of another salt."""

    salt: bytes
    tokens: tuple[int, ...]

    def path(self, end: int) -> Path:
        """Return the salt, and the first `end` tokens."""
        return self.salt, self.tokens[:end]

    def keys(self, step: int) -> list[bytes]:
        return prefix_keys(self.tokens, step, salt=self.salt)

    def cut(self, tokens: int) -> SimPrompt:
        return SimPrompt(self.salt, self.tokens[:tokens])


class Prompts:
    """Numbers for the contents of all prompts of a simulation."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Path], int] = {}

    def content(self, prompt: SimPrompt, weights: int) -> Content:
        """Return the content of the prompt's tokens, computed with `weights`: a number for each token."""
        ends = range(SPAN, len(prompt.tokens) + SPAN, SPAN)
        paths = [(weights, prompt.path(end)) for end in ends]
        numbers = [self._numbers.setdefault(path, _FIRST_NUMBER + len(self._numbers)) for path in paths]
        spans = np.array(numbers, dtype=np.int32).repeat(SPAN)
        return np.pad(spans, (0, TOKENS_MAX - len(spans)), mode="edge")


def draw_prompt(rng: random.Random, tokens_max: int) -> SimPrompt:
    """Draw one of few prompts, all of whole spans, so that many begin alike."""
    most = max(min(tokens_max, PROMPT_MAX) // SPAN, 1)
    length = rng.randint((most + 1) // 2, most) * SPAN
    fork, branch = rng.choice(_FORKS), rng.randrange(_BRANCHES)
    tokens = [(fork + branch) * 50 * (at >= fork) + at for at in range(length)]
    return SimPrompt(rng.choice(_SALTS), tuple(tokens))
