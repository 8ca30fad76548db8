"""A hand-over that comes too late: the answer with a stock connector, and the answer with kvflow.

    python examples/stale.py

Two engines run in this process, with the same model and separate caches. The prefill engine computes Bob's prompt and
keeps its blocks for `LEASE_S` seconds. In one run the decode engine reads them within that time. In the other run Bob's
request waits longer (a queue, a frozen host, a slow router), and the prefill engine reuses the blocks for Alice's
prompt.

The stock way is that of vLLM's NixlConnector: the parameters name blocks and addresses, the producer keeps the blocks
until a notification or a timer, and a read is good if NIXL reports DONE. The reader cannot know that the timer fired
before its read. It then computes the prompt's last token, as vLLM does, and goes on from there. `python3 dev.py stale
--vllm` shows the same with real vLLM servers.

Exit codes: 0 every answer was as described here, 1 one was not, 2 something failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from disaggregated.example import run_example, unpacked_model
from disaggregated.groups import open_runtime
from paged_engine import BlockId, Engine, blocks_for
from paged_engine.tokenizer import ChatTokenizer
from paged_engine.weights import load_model

import kvflow
from kvflow.transport.nixl import native

BOB = "What is the capital of France, and what is the capital of Italy? Be brief."
ALICE = "My name is Alice and my password is tulip42. What is my password?"
"""Alice's prompt has as many tokens as Bob's, so Bob's late read gets all of it."""
BLOCK_SIZE = 16
ANSWER_TOKENS = 24
LEASE_S = 1.5
LONG_LEASE_S = 60.0


class Pair:
    """A prefill engine with room for one prompt only, and a decode engine."""

    def __init__(self, prefill: Engine, decode: Engine, tokenizer: ChatTokenizer, bob: str, alice: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self._tokenizer = tokenizer
        self.bob, self.alice = tokenizer.encode_chat(bob), tokenizer.encode_chat(alice)

    async def compute(self, prompt: Sequence[int]) -> list[BlockId]:
        """Compute a prompt on the prefill engine. Return its blocks, which are free again by then."""
        async with self.prefill.reserve(len(prompt)) as block_ids:
            await self.prefill.prefill(prompt, block_ids)
            return block_ids

    async def answer_alone(self, prompt: Sequence[int]) -> str:
        """Return the right answer to a prompt, by the decode engine without a hand-over."""
        async with aclosing(self.decode.generate(prompt, max_tokens=ANSWER_TOKENS)) as tokens:
            return self._tokenizer.decode([token async for token in tokens])

    async def answer_bob(self, read: Callable[[Sequence[BlockId]], Awaitable[str]]) -> tuple[str, str]:
        """Let `read` fill blocks of the decode engine with Bob's prompt, then decode from the prompt's last token.

        Return how the read ended, as `read` says, and the answer.
        """
        async with self.decode.reserve(len(self.bob) + ANSWER_TOKENS) as block_ids:
            read_result = await read(block_ids[: blocks_for(len(self.bob), BLOCK_SIZE)])
            last, position = self.bob[-1], len(self.bob) - 1
            decoding = self.decode.decode(last, position=position, block_ids=block_ids, max_tokens=ANSWER_TOKENS)
            async with aclosing(decoding) as tokens:
                return read_result, self._tokenizer.decode([token async for token in tokens])


# --- the stock way


class StockAgent:
    """A NIXL agent and the cache that it has registered."""

    def __init__(self, name: str, engine: Engine) -> None:
        native.load_verbs()  # as for kvflow's own agents: docs/troubleshooting.md, signal 11
        import nixl  # after the environment is set

        self._tensors = list(engine.kv_caches.values())
        self.agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory(self._tensors)

    def params(self, block_ids: Sequence[BlockId]) -> dict[str, bytes]:
        """Return the transfer parameters for the reader: NIXL metadata, and addresses of blocks in the cache."""
        addresses = self.agent.get_serialized_descs(self._descriptors(block_ids))
        return {"remote_agent": self.agent.get_agent_metadata(), "remote_blocks": addresses}

    def read(self, params: dict[str, bytes], block_ids: Sequence[BlockId]) -> str:
        """Read the blocks named by `params` into `block_ids`. Return the state with which NIXL ended the read."""
        peer = self.agent.add_remote_agent(params["remote_agent"])
        remote = self.agent.deserialize_descs(params["remote_blocks"])
        handle = self.agent.initialize_xfer("READ", self._descriptors(block_ids), remote, peer, b"read")
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        return str(state)

    def _descriptors(self, block_ids: Sequence[BlockId]) -> Any:
        """Return one descriptor each for K and V of every block in every layer."""
        return self.agent.get_xfer_descs(
            [tensor[part, block] for tensor in self._tensors for part in (0, 1) for block in block_ids]
        )


async def answer_by_stock(pair: Pair, *, late: bool) -> tuple[str, str]:
    """Return Bob's answer with a stock connector. With `late`, his blocks are reused before they are read."""
    producer, consumer = StockAgent("stock-prefill", pair.prefill), StockAgent("stock-decode", pair.decode)

    async def read(block_ids: Sequence[BlockId]) -> str:
        return f"NIXL: {await asyncio.to_thread(consumer.read, params, block_ids)}"

    async with pair.prefill.reserve(len(pair.bob)) as block_ids:
        await pair.prefill.prefill(pair.bob, block_ids)
        params = producer.params(block_ids)
        if not late:
            return await pair.answer_bob(read)
        await asyncio.sleep(LEASE_S)  # the timer fires before any read, and the blocks are reused
    await pair.compute(pair.alice)
    return await pair.answer_bob(read)


# --- with kvflow


async def answer_by_kvflow(pair: Pair, *, late: bool) -> tuple[str, str]:
    """Return Bob's answer with kvflow. If the load cannot prove its bytes, the decode engine computes the prompt."""
    configs = [
        kvflow.Config(engine_id=engine_id, listen="tcp://127.0.0.1:0") for engine_id in ("prefill-0", "decode-0")
    ]
    async with open_runtime(configs[0], pair.prefill) as producer, open_runtime(configs[1], pair.decode) as consumer:

        async def read(block_ids: Sequence[BlockId]) -> str:
            try:
                await consumer.load_blocks(kvflow.LoadRequest("bob-1", ticket=params, block_ids=block_ids))
            except kvflow.errors.LeaseExpired as error:
                await pair.decode.prefill(pair.bob, block_ids)
                return f"refused, {type(error).__name__}: the decode engine computes the prompt"
            return "loaded, and the lease was open"

        async with pair.prefill.reserve(len(pair.bob)) as block_ids:
            await pair.prefill.prefill(pair.bob, block_ids)
            ttl_s = LEASE_S if late else LONG_LEASE_S
            lease = producer.serve_blocks(kvflow.ServeRequest("bob-1", block_ids, len(pair.bob), ttl_s=ttl_s))
            params = lease.ticket.to_params()
            if not late:
                answer = await pair.answer_bob(read)
            await lease  # if `late`, the lease ends as EXPIRED, and the blocks are reused
        if not late:
            return answer
        await pair.compute(pair.alice)
        return await pair.answer_bob(read)


# --- both


async def compare(checkpoint: Path, bob: str, alice: str) -> bool:
    """Run both ways, in time and late, and print Bob's answers. Return True if they are as this module describes."""
    tokenizer, model = ChatTokenizer(checkpoint), load_model(checkpoint)
    room = max(blocks_for(len(tokenizer.encode_chat(text)), BLOCK_SIZE) for text in (bob, alice))
    async with (
        Engine(model, block_count=room, block_size=BLOCK_SIZE, shuffle_seed="prefill-0") as prefill,
        Engine(model, block_count=4 * room, block_size=BLOCK_SIZE, shuffle_seed="decode-0") as decode,
    ):
        pair = Pair(prefill, decode, tokenizer, bob, alice)
        right, of_alice = await pair.answer_alone(pair.bob), await pair.answer_alone(pair.alice)
        blocks = ", ".join(map(str, await pair.compute(pair.bob)))
        print(f"""
Bob:    {bob}
Alice:  {alice}

1  Bob's prompt is computed in blocks {blocks}; they are kept for {LEASE_S:g} s
2  his request waits longer: a queue, a frozen host, a slow router
3  Alice's prompt is computed in blocks {blocks}
4  the decode engine reads blocks {blocks} over NIXL, to answer Bob

What Bob is told:
""")
        correct = True
        for way, answered in (("stock", answer_by_stock), ("kvflow", answer_by_kvflow)):
            for late in (False, True):
                read, text = await answered(pair, late=late)
                mark = "right" if text == right else "WRONG"
                print(f"{way}, {'late' if late else 'in time'}: {read}\n    {mark}: {text!r}", flush=True)
                expected = of_alice if (way, late) == ("stock", True) else right
                correct = correct and text == expected
    return correct and right != of_alice


def run(options: argparse.Namespace) -> bool:
    torch.set_num_threads(1)
    with unpacked_model(options.checkpoint) as checkpoint:
        return asyncio.run(compare(checkpoint, options.bob, options.alice))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bob", default=BOB, help="the prompt whose hand-over is late")
    parser.add_argument("--alice", default=ALICE, help="the prompt that gets its blocks; of as many tokens")
    parser.add_argument("--checkpoint", type=Path, help="an unpacked model (default: unpack SmolLM2)")
    options = parser.parse_args()
    return run_example(lambda: run(options), transport="shm")


if __name__ == "__main__":
    sys.exit(main())
