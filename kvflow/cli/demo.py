"""`kvflow demo`: one process offers the blocks of a prompt, another loads them over NIXL, and all bytes are compared.

There is no model: the "prompt" is random bytes. It shows that an installation works, and what a hand-over looks like.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

import kvflow
from kvflow.bench.child import RankProcess, open_children
from kvflow.bench.loads import Transport, scattered

if TYPE_CHECKING:
    import torch

BLOCKS = 128
BLOCK_SIZE = 16
LAYERS = 8
TOKENS_MAX = BLOCKS * BLOCK_SIZE
_SHAPE = (2, BLOCKS, 4, BLOCK_SIZE, 64)


@dataclass(slots=True)
class Engine:
    """One process: its runtime and its cache."""

    runtime: kvflow.Runtime
    kv_caches: Mapping[str, torch.Tensor]
    leases: list[kvflow.Lease] = field(default_factory=list)

    async def offer(self, block_ids: Sequence[int], tokens: int) -> dict[str, Any]:
        """The prefill side: "compute" a prompt into its blocks and offer them; the ticket, as a router gets it."""
        for tensor in self.kv_caches.values():
            tensor[:, list(block_ids)] = tensor[:, list(block_ids)].normal_()
        self.leases.append(self.runtime.serve_blocks(kvflow.ServeRequest("demo-1", block_ids, num_tokens=tokens)))
        return self.leases[0].ticket.to_params()

    async def load(self, ticket: Mapping[str, Any], block_ids: Sequence[int]) -> kvflow.LoadReport:
        """The decode side: pull what the ticket offers into blocks of its own."""
        return await self.runtime.load_blocks(kvflow.LoadRequest("demo-1", ticket, block_ids))

    async def outcome(self) -> str:
        """What has become of the offer."""
        return str(await self.leases[0])

    async def digest(self, block_ids: Sequence[int], tokens: int) -> str:
        """Of every byte of a prompt, token by token: the rest of its last block belongs to nobody."""
        digest = hashlib.sha256()
        for tensor in self.kv_caches.values():
            by_token = tensor[:, list(block_ids)].permute(1, 3, 0, 2, 4).flatten(0, 1)[:tokens]
            digest.update(by_token.contiguous().numpy().tobytes())
        return digest.hexdigest()


@contextlib.asynccontextmanager
async def open_engine(engine_id: str) -> AsyncIterator[Engine]:
    """An open runtime over NIXL with an empty cache."""
    import torch

    kv_caches = {f"layers.{index}": torch.zeros(_SHAPE, dtype=torch.float16) for index in range(LAYERS)}
    async with kvflow.Runtime(kvflow.Config(engine_id=engine_id, listen="tcp://127.0.0.1:0")) as runtime:
        layout = kvflow.CacheLayout.infer(kv_caches, order="HND", block_size=BLOCK_SIZE)
        await runtime.register_kv_caches(kv_caches, layout)
        yield Engine(runtime, kv_caches)


def hand_over(tokens: int, transport: Transport, console: Console) -> bool:
    """Start both engines, hand one prompt over, report; whether all bytes are equal. Raises BenchError."""
    count = -(-tokens // BLOCK_SIZE)
    theirs, ours = (scattered(side, BLOCKS, count) for side in ("prefill", "decode"))
    ranks = [RankProcess(name, partial(open_engine, name)) for name in ("prefill-0", "decode-0")]
    with open_children(ranks, transport.environment) as engines:
        prefill, decode = engines["prefill-0"], engines["decode-0"]
        ticket = prefill.run(Engine.offer, theirs, tokens)
        console.print(f"prefill-0 (process {prefill.pid}) offers {tokens} tokens in blocks {_shown(theirs)}")
        report = decode.run(Engine.load, ticket, ours)
        console.print(f"decode-0 (process {decode.pid}) has loaded them over {transport} into {_shown(ours)}:")
        console.print(f"  {report.bytes:,} bytes in {report.descriptors} pieces, {report.total_s * 1e3:.1f} ms")
        for phase, seconds in report.seconds.items():
            console.print(f"  {phase:>9} {seconds * 1e3:8.2f} ms")
        console.print(f"the lease ended as {prefill.run(Engine.outcome)!r}: prefill-0 has its blocks back")
        same = prefill.run(Engine.digest, theirs, tokens) == decode.run(Engine.digest, ours, tokens)
    console.print("every byte is equal" if same else "the bytes differ", style="green" if same else "red")
    return same


def _shown(block_ids: Sequence[int]) -> str:
    return ", ".join(map(str, block_ids[:4])) + (", ..." if len(block_ids) > 4 else "")
