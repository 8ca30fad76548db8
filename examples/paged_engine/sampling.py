"""Choice of the next token: the likeliest token, or a random draw.

A draw depends only on the seed and on the token's position in its sequence: not on the engine, the batch, or the engine
that made the tokens before. So a prompt computed in one engine and answered by another has the same answer as in one
process, and a request that is tried again gets the same answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request. A temperature of 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Draw only among the likeliest tokens that together have this probability, and at least one token."""
    seed: int = 0

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """Choose the token at `position` of its sequence by its logits."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        # Subtract the largest logit first; otherwise a temperature near 0 would give infinities.
        probabilities = ((logits.double() - logits.max()) / self.temperature).softmax(dim=-1)
        if self.top_p < 1.0:
            probabilities = _likeliest(probabilities, self.top_p)
        sums = probabilities.cumsum(dim=-1)
        drawn = random.Random(f"{self.seed} {position}").random() * sums[-1]  # always below the last sum
        return int(torch.searchsorted(sums, drawn, right=True))


def _likeliest(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the probabilities of the likeliest tokens until their sum reaches `top_p`. Set the others to 0."""
    # All tokens below this threshold together have less than 1 - top_p, so they are not sorted: sorting a whole
    # vocabulary takes milliseconds.
    token_ids = (probabilities >= (1.0 - top_p) / len(probabilities)).nonzero().flatten()
    falling, order = probabilities[token_ids].sort(descending=True, stable=True)
    count = int((falling.cumsum(dim=-1) < top_p).sum()) + 1
    return torch.zeros_like(probabilities).index_copy_(0, token_ids[order[:count]], falling[:count])


GREEDY = Sampling()
