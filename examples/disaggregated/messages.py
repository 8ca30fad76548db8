"""What the router and its workers say to each other: commands one way, events the other, as JSON.

The router asks one thing at a time of each worker, so no event needs to say which command it answers.

    Prefill   -> Prefilled, Released
    Decode    -> Loaded, Token ..., Done
    Generate  -> Token ..., Done

A worker says Ready once, and Failed in place of any answer.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """All messages are tagged with their name and refuse fields they do not know."""


class Prefill(Message, frozen=True):
    """Compute the prompt, answer with its first new token, and offer the blocks."""

    request_id: str
    prompt: list[int]


class Decode(Message, frozen=True):
    """Load the offered blocks and continue after `token`. The prompt itself is not sent: its KV cache is."""

    request_id: str
    prompt_count: int
    token: int
    ticket: dict[str, Any]
    max_tokens: int


class Generate(Message, frozen=True):
    """Answer the prompt without any other engine's help."""

    prompt: list[int]
    max_tokens: int


class Ready(Message, frozen=True):
    """The worker takes commands."""


class Prefilled(Message, frozen=True):
    """The prompt is computed; its blocks may be loaded with the ticket."""

    token: int
    ticket: dict[str, Any]


class Released(Message, frozen=True):
    """The prompt's blocks were given back, and why."""

    outcome: str


class Loaded(Message, frozen=True):
    """kvflow's own report of the load."""

    sources: list[str]
    blocks: int
    descriptors: int
    size: int
    blocks_left: int
    """Of layers with a window, those that lie before it and were not read."""
    size_left: int
    seconds: dict[str, float]
    total_s: float


class Token(Message, frozen=True):
    """One generated token."""

    token: int


class Done(Message, frozen=True):
    """The stream of tokens has ended."""


class Failed(Message, frozen=True):
    """The command, or the start of the worker, came to nothing."""

    error: str


Command = Prefill | Decode | Generate
Event = Ready | Prefilled | Released | Loaded | Token | Done | Failed
