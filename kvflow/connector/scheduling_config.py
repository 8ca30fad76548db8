"""Settings of a connector's scheduler half: which requests consume or produce, and which tokens are offered."""

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
    """Settings of a `ConnectorScheduler`. `block_size` is the engine's block size in tokens."""

    block_size: Size
    lease_ttl_s: Seconds
    """Seconds that an offered prompt is kept for its reader, counted from the end of its request."""
    groups: SchedulerGroups = ()
    """Groups of layers of a cache that has several, in the order of the engine's block tables; `block_size` must be the
    first group's. Empty: one group of full attention."""
    fetch_tokens_min: Size = 1
    """Fewest tokens that are loaded; computing fewer is faster."""
    full_blocks_only: bool = False
    """Offer only full blocks. A prompt shorter than one block offers nothing."""
    leave_last_token: bool = False
    """Load less than a whole prompt, or nothing: the last token is computed locally, and the blocks that the engine
    keeps for a whole prompt lack what that needs. Always on for a cache with state, since a state belongs to one token
    only."""
    withhold_last_token: bool = False
    """Offer a prompt without its last token, although that is computed. For readers that do not load whole prompts, if
    the engine cannot leave the last token uncomputed."""
    release_failed_loads: bool = True
    """Release the ticket of a failed load, so its producer need not keep the blocks until the lease runs out. False for
    routers that retry with the same ticket, for example at another decode engine."""
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
        """All groups; one group of full attention if `groups` is empty."""
        return self.groups or (GroupFacts(name=DEFAULT_NAME, block_size=self.block_size),)

    @property
    def has_state(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @property
    def leaves_last_token(self) -> bool:
        """True if an offer of a whole prompt cannot be used."""
        return self.leave_last_token or self.has_state

    def takes(self, params: Mapping[str, Any]) -> bool:
        """Return whether a request loads its prompt from a remote engine.

        Args:
            params: the request's `kv_transfer_params`.

        Returns:
            True if `params` ask for a load, and this engine consumes.
        """
        return self.consumes and bool(params.get("do_remote_prefill"))

    def offers(self, params: Mapping[str, Any]) -> bool:
        """Return whether a request computes its prompt for a reader.

        Args:
            params: the request's `kv_transfer_params`.

        Returns:
            True if `params` ask for an offer, and this engine produces. A prompt that is loaded is not offered again.
        """
        return self.produces and bool(params.get("do_remote_decode")) and not self.takes(params)

    @property
    def full_block_tokens(self) -> int:
        """Smallest number of tokens that fills whole blocks of every group that keeps the beginning of a prompt."""
        return math.lcm(*(group.block_size for group in self.all_groups if group.whole), 1)

    def offered_of(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are offered.

        Args:
            num_prompt_tokens: number of tokens of the prompt.

        Returns:
            `num_prompt_tokens`; with `full_blocks_only`, rounded down to whole blocks of every group.
        """
        return num_prompt_tokens - (num_prompt_tokens % self.full_block_tokens if self.full_blocks_only else 0)
