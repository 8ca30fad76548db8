"""How long a prompt may be, and what that says of a text before it is tokenized.

A token stands for a bounded number of characters, so a text of many more cannot fit, whatever it says. Tokenizing it to
find that out would take minutes of a core.
"""

from __future__ import annotations

CACHE_TOKENS = 4096
"""Tokens of a worker's cache, hence the longest prompt and its answer. Some 180 MiB: 30 layers, K and V, 3 heads of 64
float32 values for each token."""


def too_long(requested: str, tokens_max: int = CACHE_TOKENS) -> str:
    """Return what OpenAI says of a prompt that is too long."""
    return f"This model's maximum context length is {tokens_max} tokens. However, you requested {requested}."


def tokens_at_least(chars: int, longest_token: int) -> int:
    """Return how many tokens a text has at least, of which the longest has so many characters."""
    return -(-chars // longest_token)
