"""Which prompts an engine's blocks hold, as the scheduler's half reports it to the workers with each step.

A block holds tokens of a prompt from the step that has computed them until the engine's pool gives the block to
something else, however often the engine's prefix cache frees it and finds it again in between. The workers get a report
when a block is computed and when it is reused. So each worker knows at any time which prompts its memory holds, and
answers a peer's question by itself: no question reaches the scheduler, an idle engine answers like a busy one, and no
peer takes blocks from the engine's pool.

The engine's pool has to offer `watch`, a function that takes blocks that are in use now. The pool then calls
`note_reused` once for each of these blocks when it gives the block to something else, before the step that will write
there leaves. That may happen before the workers know of the block: blocks filled by a request's answer are reported
with the step after its end. A block that is reused before its report is left out of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import structs

from kvflow.checks import counted
from kvflow.connector.step import NO_BLOCK, CachedBlocks, Step

__all__ = ["CachedPrompts", "GroupTablesOf"]

GroupTablesOf: TypeAlias = Callable[[str], Sequence[Sequence[int]]]
"""Function that takes a request id and returns the request's block tables: one for each group of layers, also if the
engine has only one group."""


@dataclass(slots=True)
class _Prompt:
    keys: Sequence[bytes]
    """Prefix key of each full block of the prompt, in prompt order."""
    reported: int = 0
    """Number of the prompt's leading blocks that have been reported to the workers."""


class CachedPrompts:
    """The prompts of an engine's requests, and the blocks that hold them; makes the reports for the workers.

    `block_tokens` is the number of tokens in a block, the same in all groups. `watch` is the pool's function of the
    module docstring. `null_block` is the id that stands in a block table where the group needs no block.
    """

    def __init__(
        self, block_tokens: int, watch: Callable[[Sequence[int]], None], *, null_block: int = NO_BLOCK
    ) -> None:
        self._block_tokens = block_tokens
        self._watch = watch
        self._null_block = null_block
        self._prompts: dict[str, _Prompt] = {}
        self._key_of: dict[int, bytes] = {}
        """Prefix key that each block holds, by block id, as the workers will know it after the next step."""
        self._reused: list[int] = []
        self._cached_blocks: list[CachedBlocks] = []
        """Blocks of requests that have ended since the last step, for the next step's report. Some may have been reused
        since."""

    def __repr__(self) -> str:
        blocks, requests = counted(len(self._key_of), "block"), counted(len(self._prompts), "request")
        return f"<CachedPrompts {blocks} of {requests} and former ones>"

    @property
    def must_report(self) -> bool:
        """True if reused blocks have to be reported to the workers, even if no request needs a step."""
        return bool(self._reused)

    def add(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Add a request that has arrived. `keys` are the prefix keys of its prompt's full blocks, in prompt order."""
        if keys:
            self._prompts[request_id] = _Prompt(keys)

    def note_reused(self, block_id: int) -> None:
        """Note for the next report that the pool has given a watched block to something else."""
        if self._key_of.pop(block_id, None) is not None:
            self._reused.append(block_id)

    def build_step(
        self, step: Step, scheduled: Mapping[str, int], *, preempted: Iterable[str], block_ids: GroupTablesOf
    ) -> None:
        """Add the reused blocks and the newly cached blocks to `step`; see `ConnectorScheduler.build_step`."""
        for request_id in preempted:
            if request_id in self._prompts:
                self._prompts[request_id].reported = 0
        step.reused, self._reused = tuple(self._reused), []
        step.cached_blocks, self._cached_blocks = [*filter(None, map(self._without_reused, self._cached_blocks))], []
        for request_id, computed in scheduled.items():
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            full = min(computed // self._block_tokens, len(prompt.keys))
            if full > prompt.reported:
                step.cached_blocks += self._newly_cached(
                    prompt.keys, range(prompt.reported, full), block_ids(request_id)
                )
                prompt.reported = full

    def finish(
        self, request_id: str, *, keys: Callable[[], Sequence[bytes]], computed: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Add the blocks of an ended request, which are filled by prompt and answer, to the next report.

        The request has ended with `computed` tokens, including its answer's, and still has its blocks. `keys` returns
        the prefix keys of all its full blocks. The blocks of the answer help requests that continue the conversation.
        """
        prompt = self._prompts.pop(request_id, None)
        full = computed // self._block_tokens
        if prompt is not None and full > prompt.reported == len(prompt.keys):
            self._cached_blocks += self._newly_cached(keys()[:full], range(prompt.reported, full), block_ids)

    def _newly_cached(self, keys: Sequence[bytes], span: range, tables: Sequence[Sequence[int]]) -> list[CachedBlocks]:
        """Return a report of the blocks at the indexes `span` of `tables`, without leading blocks that workers know.

        The list has one `CachedBlocks`, or none if the workers know all of these blocks.
        """
        rows = [tuple(self._block_at(table, at) for table in tables) for at in span]
        known = (
            all(self._key_of.get(one) == keys[at] for one in row if one != NO_BLOCK)
            for at, row in zip(span, rows, strict=True)
        )
        new = next((nth for nth, is_known in enumerate(known) if not is_known), len(rows))
        start, rows = span.start + new, rows[new:]
        if not rows:
            return []
        found = [(one, keys[start + nth]) for nth, row in enumerate(rows) for one in row if one != NO_BLOCK]
        self._watch([one for one, key in found if self._key_of.get(one) != key])
        self._key_of.update(found)
        parent = keys[start - 1] if start else b""
        return [
            CachedBlocks(
                parent=parent, keys=tuple(keys[start : span.stop]), block_tables=tuple(zip(*rows, strict=True))
            )
        ]

    def _without_reused(self, cached_blocks: CachedBlocks) -> CachedBlocks | None:
        """Return `cached_blocks` with `NO_BLOCK` for each block that was reused since; None if all were reused."""
        key_of, keys = self._key_of, cached_blocks.keys
        tables = tuple(
            tuple(one if key_of.get(one) == key else NO_BLOCK for key, one in zip(keys, table, strict=True))
            for table in cached_blocks.block_tables
        )
        left = any(one != NO_BLOCK for table in tables for one in table)
        return structs.replace(cached_blocks, block_tables=tables) if left else None

    def _block_at(self, table: Sequence[int], at: int) -> int:
        return table[at] if at < len(table) and table[at] != self._null_block else NO_BLOCK
