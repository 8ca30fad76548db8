"""The words between an engine's scheduler and `connector.scheduler`: what the one tells, and what it is told."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

GivenTables: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of a request as its engine has them: a list, or a table for each group of layers."""
TablesOf: TypeAlias = Callable[[str], GivenTables]
"""Gives all blocks of a request, by its id."""


class EngineRequest(Protocol):
    """A scheduler's request, as far as a connector has to know it."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """None if the engine does not know them, or they do not say what the prompt is: nothing is compared then. Where
        they say it together with something else, such as pictures, they are marked with it (`marked_by_keys`)."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


class Sharing(enum.Enum):
    """Requests that have the same ticket as this one."""

    ALONE = enum.auto()
    """None: the ticket is the request's own."""
    FIRST = enum.auto()
    """Samples of the same prompt may come, or have come."""
    FOLLOWS = enum.auto()
    """As `FIRST`; if none of the samples is here the ticket is another engine's to use."""


class Matched(NamedTuple):
    """Prompt tokens that can come from remote, and whether they come between the steps."""

    tokens: int | None
    """None while that depends on another request's load: ask again."""
    asynchronous: bool


class Scheduled(NamedTuple):
    """A request of this step, and how many of its tokens are computed once the step is."""

    request_id: str
    num_computed_tokens: int


class Finished(NamedTuple):
    """Answer to the end of a request. With `hold_blocks` its blocks stay until it is reported as sent or received."""

    hold_blocks: bool
    params: dict[str, Any] | None
    """Parameters for its router; None if its prompt is not offered."""
