"""Which token comes next: the likeliest one, or one drawn at random.

A draw depends on the seed and on where in its sequence the token stands, and on nothing else. So it does not matter
which engine makes it, in which batch, or whether another engine has made the tokens before: a prompt that is computed
here and answered there has the same answer as in one process, and a request that is tried again has it again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose; a temperature of 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability; always at least one."""
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """The token at that position of its sequence, given its logits."""
        if self.is_greedy:
            return int(logits.argmax())
        # The largest is subtracted first: else a temperature near 0 would give infinities.
        probabilities = ((logits.double() - logits.max()) / self.temperature).softmax(dim=-1)
        if self.top_p < 1.0:
            probabilities = _likeliest(probabilities, self.top_p)
        sums = probabilities.cumsum(dim=-1)
        drawn = random.Random(f"{self.seed} {position}").random() * sums[-1]  # always below the last sum
        return int(torch.searchsorted(sums, drawn, right=True))


def _likeliest(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Those of the likeliest tokens up to the one with which they reach `top_p`; 0 for the others."""
    # Those below this together are less than what may be left out; sorting a whole vocabulary takes milliseconds.
    token_ids = (probabilities >= (1.0 - top_p) / len(probabilities)).nonzero().flatten()
    falling, order = probabilities[token_ids].sort(descending=True, stable=True)
    count = int((falling.cumsum(dim=-1) < top_p).sum()) + 1
    return torch.zeros_like(probabilities).index_copy_(0, token_ids[order[:count]], falling[:count])


GREEDY = Sampling()
