"""Settings of a connector's scheduler half: which requests load or offer prompts, and which tokens are offered."""

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
    """Settings of a `ConnectorScheduler`. `block_size` is the number of tokens in a block of the engine."""

    block_size: Size
    lease_ttl_s: Seconds
    """Seconds for which an offered prompt's blocks are held for readers, from the end of the prefill request."""
    groups: SchedulerGroups = ()
    """Groups of layers of the cache, in the order of the engine's block tables; the first must have `block_size`. Empty
    for one group of full attention."""
    fetch_tokens_min: Size = 1
    """Smallest number of tokens to load. If fewer are missing, they are computed locally."""
    full_blocks_only: bool = False
    """True to offer only full blocks: a prompt shorter than one block offers nothing."""
    leave_last_token: bool = False
    """True to ignore offers of a whole prompt. This engine computes the last prompt token in any case, and needs the
    window before that token; a producer with the whole prompt may have freed that window's first block. With recurrent
    state, such offers are always ignored, since a state cannot go back by one token."""
    withhold_last_token: bool = False
    """True to offer a prompt without its last token, although this engine computes that token. Use this if the readers
    ignore offers of whole prompts (`leave_last_token`), and this engine has to compute whole prompts."""
    release_failed_loads: bool = True
    """True to release the ticket when a load fails, so that the producer can reuse the blocks before the lease expires.
    False if routers retry with the same ticket, for example at another decode engine."""
    late_blocks: bool = False
    """True to give a request with a pending ticket blocks only once its prompt is offered, that is once the producer
    has begun to compute it."""
    produces: bool = True
    consumes: bool = True

    def __post_init__(self) -> None:
        checks.normalize_fields(self, ConfigError)
        if self.groups and self.groups[0].block_size != self.block_size:
            first = self.groups[0].block_size
            raise ConfigError(f"groups: block_size is {self.block_size}, but the first group's is {first}")
        if self.full_blocks_only and self.has_state:
            raise ConfigError("full_blocks_only: a state belongs to the last token of the prompt, not to a full block")
        if self.withhold_last_token and self.has_state:
            raise ConfigError("withhold_last_token: a state is that of the last token that was computed")
        if self.late_blocks and not self.consumes:
            raise ConfigError("late_blocks: for engines that load prompts, but this one loads none")

    @property
    def all_groups(self) -> tuple[GroupFacts, ...]:
        """The cache's groups of layers: `groups`, or one group of full attention if `groups` is empty."""
        return self.groups or (GroupFacts(name=DEFAULT_NAME, block_size=self.block_size),)

    @property
    def has_state(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @property
    def leaves_last_token(self) -> bool:
        """True if this engine loads no whole prompt: with `leave_last_token`, or if the cache has recurrent state."""
        return self.leave_last_token or self.has_state

    def takes(self, params: Mapping[str, Any]) -> bool:
        """Return whether a request is to load its prompt from a remote engine.

        Args:
            params: the request's `kv_transfer_params`.

        Returns:
            True if `params` ask for a load, and this engine's role is to load.
        """
        return self.consumes and bool(params.get("do_remote_prefill"))

    def offers(self, params: Mapping[str, Any]) -> bool:
        """Return whether a request is to offer its prompt to readers.

        Args:
            params: the request's `kv_transfer_params`.

        Returns:
            True if `params` ask for an offer, and this engine's role is to offer. False for a request that loads its
            prompt.
        """
        return self.produces and bool(params.get("do_remote_decode")) and not self.takes(params)

    @property
    def full_block_tokens(self) -> int:
        """Smallest number of tokens that fills whole blocks in all groups of full attention.

        Groups with a window or recurrent state do not count, since they do not keep a whole prompt.
        """
        return math.lcm(*(group.block_size for group in self.all_groups if group.whole), 1)

    def offered_of(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are offered.

        Args:
            num_prompt_tokens: number of tokens of the prompt.

        Returns:
            `num_prompt_tokens`; with `full_blocks_only`, rounded down to a multiple of `full_block_tokens`.
        """
        return num_prompt_tokens - (num_prompt_tokens % self.full_block_tokens if self.full_blocks_only else 0)
