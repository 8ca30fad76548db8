"""The settings of a connector's scheduler half: which requests concern it, and which part of a prompt is offered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from kvflow import checks
from kvflow.checks import Seconds, Size
from kvflow.core.cache.groups import DEFAULT_NAME, GroupFacts, GroupKind
from kvflow.errors import ConfigError

SchedulerGroups: TypeAlias = Annotated[tuple[GroupFacts, ...], Meta(max_length=1 << 10)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """The settings a scheduler decides by. `block_size` is the engine's, in tokens."""

    block_size: Size
    lease_ttl_s: Seconds
    """Time an offered prompt is kept for its reader, from the end of its request on."""
    groups: SchedulerGroups = ()
    """Groups of layers of a cache with several, in the order of the engine's block tables; `block_size` is the
    first one's then. None is one group of full attention."""
    fetch_tokens_min: Size = 1
    """With fewer tokens than this to come from remote, computing them is faster."""
    full_blocks_only: bool = False
    """Offer only blocks that are full: a prompt shorter than one offers nothing."""
    leave_last_token: bool = False
    """Take less than the whole prompt from remote, or nothing: its last token is computed here, and what that needs is
    not among the blocks that the engine keeps for a whole prompt. Always so with state, which is of one token only."""
    withhold_last_token: bool = False
    """Offer a prompt without its last token although that is computed: for readers that take no whole prompt, where the
    engine does not compute prompts without it."""
    release_failed_loads: bool = True
    """Give the offer of a load that has failed back: its producer need not keep the blocks for the rest of their
    time. False for routers that try again with the same ticket, as at another decode engine."""
    produces: bool = True
    consumes: bool = True

    def __post_init__(self) -> None:
        checks.settle(self, ConfigError)
        if self.groups and self.groups[0].block_size != self.block_size:
            first = self.groups[0].block_size
            raise ConfigError(f"groups: block_size is {self.block_size}, but the first group's is {first}")
        if self.full_blocks_only and self.has_state:
            raise ConfigError("full_blocks_only: a state belongs to the last token of the prompt, not to a full block")
        if self.withhold_last_token and self.has_state:
            raise ConfigError("withhold_last_token: a state is that of the last token that was computed")

    @property
    def all_groups(self) -> tuple[GroupFacts, ...]:
        """Every group, also if there is one."""
        return self.groups or (GroupFacts(name=DEFAULT_NAME, block_size=self.block_size),)

    @property
    def has_state(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @property
    def leaves_last_token(self) -> bool:
        """True if an offer of a whole prompt is of no use."""
        return self.leave_last_token or self.has_state

    def takes(self, params: Mapping[str, Any]) -> bool:
        """Tell whether a request is to come from remote.

        Args:
            params: its `kv_transfer_params`.

        Returns:
            True if they ask for it, and this engine consumes.
        """
        return self.consumes and bool(params.get("do_remote_prefill"))

    def offers(self, params: Mapping[str, Any]) -> bool:
        """Tell whether a request is computed for a reader.

        Args:
            params: its `kv_transfer_params`.

        Returns:
            True if they ask for it, and this engine produces. What comes from remote is not offered again.
        """
        return self.produces and bool(params.get("do_remote_decode")) and not self.takes(params)

    @property
    def full_block_tokens(self) -> int:
        """Tokens that fill whole blocks of every group that holds the beginning of a prompt."""
        return math.lcm(*(group.block_size for group in self.all_groups if group.whole), 1)

    def offered_of(self, num_prompt_tokens: int) -> int:
        """Tokens of a prompt that are offered.

        Args:
            num_prompt_tokens: how many it has.

        Returns:
            As many, or those that fill whole blocks of every group with `full_blocks_only`.
        """
        return num_prompt_tokens - (num_prompt_tokens % self.full_block_tokens if self.full_blocks_only else 0)
