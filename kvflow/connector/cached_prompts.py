"""CachedPrompts: with each step, an engine's scheduler reports to the workers which blocks hold which prompts.

Once a step has computed tokens in a block, the block holds them until the engine's block pool reuses it. The workers
get a report when a block is filled and when it is reused. So they answer peers' questions by themselves: no question
reaches the scheduler, an idle engine answers like a busy one, and no peer takes blocks from the engine's pool.

The block pool has to offer `watch`, a function that takes block ids. When the pool reuses a watched block, it calls
`note_reused` once, before the step that writes the block goes to the workers. A block may be reused before it was
reported, because blocks of a request's answer are reported with the step after the request's end. Then it is left out.

A group with a window loses blocks of a long answer while the request runs. The pool still has their content, so these
blocks are watched once they are filled, and reported with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from msgspec import structs

from kvflow.checks import counted
from kvflow.connector.step import NO_BLOCK, CachedBlocks, Step

__all__ = ["CachedPrompts", "GroupTablesOf"]

GroupTablesOf: TypeAlias = Callable[[str], Sequence[Sequence[int]]]
"""Function that takes a request id and returns its block tables: a list with one table for each group of layers."""


class _Place(NamedTuple):
    """Place of a block in the block tables of a request."""

    request_id: str
    group: int
    at: int
    """Index in the group's block table."""


@dataclass(slots=True)
class _Prompt:
    keys: Sequence[bytes]
    """For each full block of the prompt, in order: the key of the prompt's prefix that ends with that block."""
    reported: int = 0
    """Number of leading blocks of the prompt that have been reported to the workers as filled."""
    noted: int = 0
    """Number of leading blocks, those of the answer included, after which no filled block was noted."""
    answer_blocks: dict[_Place, int] = field(default_factory=dict)
    """Noted blocks of the answer, in groups that lose blocks while the request runs."""


class CachedPrompts:
    """Reports to an engine's workers which blocks hold which prompts. The workers let peers read these blocks.

    Each block, of whichever group, has `block_tokens` tokens. `watch` takes block ids, and has the engine's block pool
    call `note_reused` when the pool reuses one of these blocks. In a group's block table, `null_block` stands where the
    group needs no block. `freeing_groups` are the indexes of the groups that lose blocks while a request runs.
    """

    def __init__(
        self,
        block_tokens: int,
        watch: Callable[[Sequence[int]], None],
        *,
        null_block: int = NO_BLOCK,
        freeing_groups: Sequence[int] = (),
    ) -> None:
        self._block_tokens = block_tokens
        self._watch = watch
        self._null_block = null_block
        self._freeing_groups = tuple(freeing_groups)
        self._prompts: dict[str, _Prompt] = {}
        self._key_of: dict[int, bytes] = {}
        """By block id, the prefix key that the workers will have for the block once they get the next step."""
        self._place_of: dict[int, _Place] = {}
        """By block id, the latest place at which the block was noted, until the pool reuses it or the request ends."""
        self._reused: list[int] = []
        self._cached_blocks: list[CachedBlocks] = []
        """Blocks of requests that have ended since the last step, for the next report. The pool may have reused some of
        these blocks."""

    def __repr__(self) -> str:
        blocks, requests = counted(len(self._key_of), "block"), counted(len(self._prompts), "request")
        return f"<CachedPrompts {blocks} of {requests} and former ones>"

    @property
    def must_report(self) -> bool:
        """True if workers must be told, even in a step without requests, which cached blocks the engine overwrites."""
        return bool(self._reused)

    def holds(self, block_id: int) -> bool:
        """Return True if peers may read the block, now or once the workers get the next step."""
        return block_id in self._key_of

    def add(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Add a request that has arrived. `keys` has the prefix key of each full block of the prompt, in order."""
        if keys:
            self._prompts[request_id] = _Prompt(keys)

    def note_reused(self, block_id: int) -> None:
        """Record, for the next report, that the engine's pool reuses a watched block."""
        self._place_of.pop(block_id, None)
        if self._key_of.pop(block_id, None) is not None:
            self._reused.append(block_id)

    def withdraw_all(self) -> None:
        """With the next report, take all blocks back, also later ones of the present requests: peers find none of them.

        Call this when the blocks no longer hold what their keys say, for example after other weights were loaded.
        """
        self._prompts.clear()
        self._place_of.clear()
        self._reused += self._key_of
        self._key_of.clear()

    def build_step(
        self, step: Step, scheduled: Mapping[str, int], *, preempted: Iterable[str], block_ids: GroupTablesOf
    ) -> None:
        """Set `step.reused` to the blocks reused since the last step, and `step.cached_blocks` to newly filled blocks.

        `scheduled` has each request's total of computed tokens after the step. `preempted` are the ids of requests that
        have lost their blocks. `block_ids` returns a request's block tables.
        """
        for request_id in preempted:
            if request_id in self._prompts:
                prompt = self._prompts[request_id]
                prompt.reported = prompt.noted = 0
                self._take_noted(prompt)
        step.reused, self._reused = tuple(self._reused), []
        step.cached_blocks, self._cached_blocks = [*filter(None, map(self._without_reused, self._cached_blocks))], []
        for request_id, computed in scheduled.items():
            entry = self._prompts.get(request_id)
            if entry is None:
                continue
            filled = computed // self._block_tokens
            full = min(filled, len(entry.keys))
            if full > entry.reported:
                step.cached_blocks += self._newly_cached(entry.keys, range(entry.reported, full), block_ids(request_id))
                entry.reported = full
            if self._freeing_groups and filled > max(entry.noted, len(entry.keys)):
                self._note_answer(request_id, entry, filled, block_ids(request_id))

    def finish(
        self, request_id: str, *, keys: Callable[[], Sequence[bytes]], computed: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Add the full blocks of an ended request, those of its answer included, to the next report.

        Blocks of the answer help requests that continue the conversation. `computed` is the number of computed tokens,
        answer included. `keys` returns the prefix key of each full block, in order. `block_ids` are the block tables.
        """
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        full, noted = computed // self._block_tokens, self._take_noted(prompt)
        if full > prompt.reported == len(prompt.keys):
            tables = [list(table) for table in block_ids]
            for (_, group, at), block in noted.items():
                if at < min(full, len(tables[group])) and self._block_at(tables[group], at) == NO_BLOCK:
                    tables[group][at] = block
            self._cached_blocks += self._newly_cached(keys()[:full], range(prompt.reported, full), tables)

    def _note_answer(self, request_id: str, prompt: _Prompt, filled: int, tables: Sequence[Sequence[int]]) -> None:
        """Note and watch the blocks that the answer has filled since the last call, in groups that lose blocks.

        The request has filled `filled` blocks of each group. `tables` are its block tables.
        """
        new = range(max(prompt.noted, len(prompt.keys)), filled)
        places = (_Place(request_id, group, at) for group in self._freeing_groups for at in new)
        blocks = {place: self._block_at(tables[place.group], place.at) for place in places}
        blocks = {place: block for place, block in blocks.items() if block != NO_BLOCK}
        self._watch([*blocks.values()])
        prompt.answer_blocks |= blocks
        self._place_of.update((block, place) for place, block in blocks.items())
        prompt.noted = filled

    def _take_noted(self, prompt: _Prompt) -> dict[_Place, int]:
        """Forget the noted blocks of a request's answer. Return those that the pool has not reused."""
        noted, prompt.answer_blocks = prompt.answer_blocks, {}
        kept = {place: block for place, block in noted.items() if self._place_of.get(block) == place}
        for block in kept.values():
            del self._place_of[block]
        return kept

    def _newly_cached(self, keys: Sequence[bytes], span: range, tables: Sequence[Sequence[int]]) -> list[CachedBlocks]:
        """Return a list with one `CachedBlocks`, for the blocks at the indexes `span` of a request's block tables.

        `keys[i]` is the prefix key of the blocks at index i. Leading blocks that were reported before are left out. If
        all blocks were reported before, return [].
        """
        rows = [tuple(self._block_at(table, at) for table in tables) for at in span]
        known = (
            all(self._key_of.get(block) == keys[at] for block in row if block != NO_BLOCK)
            for at, row in zip(span, rows, strict=True)
        )
        new = next((nth for nth, is_known in enumerate(known) if not is_known), len(rows))
        start, rows = span.start + new, rows[new:]
        if not rows:
            return []
        new_keys = [(block, keys[start + nth]) for nth, row in enumerate(rows) for block in row if block != NO_BLOCK]
        self._watch([block for block, key in new_keys if self._key_of.get(block) != key])
        self._key_of.update(new_keys)
        parent = keys[start - 1] if start else b""
        return [
            CachedBlocks(
                parent=parent, keys=tuple(keys[start : span.stop]), block_tables=tuple(zip(*rows, strict=True))
            )
        ]

    def _without_reused(self, cached_blocks: CachedBlocks) -> CachedBlocks | None:
        """Return `cached_blocks` with `NO_BLOCK` for each block that the pool has reused.

        None if the pool has reused all blocks.
        """
        key_of, keys = self._key_of, cached_blocks.keys
        tables = tuple(
            tuple(block if key_of.get(block) == key else NO_BLOCK for key, block in zip(keys, table, strict=True))
            for table in cached_blocks.block_tables
        )
        left = any(block != NO_BLOCK for table in tables for block in table)
        return structs.replace(cached_blocks, block_tables=tables) if left else None

    def _block_at(self, table: Sequence[int], at: int) -> int:
        return table[at] if at < len(table) and table[at] != self._null_block else NO_BLOCK
