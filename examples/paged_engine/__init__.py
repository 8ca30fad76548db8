"""A small paged engine for the examples: one Llama model, paged KV cache, sampling, asyncio.

It takes the place of a real engine, and does not use kvflow. The examples use its `kv_caches`, which they register,
`reserve`, which reserves blocks for an `async with`, `prefill` and `decode`.
"""

from paged_engine.cache import BlockId, BlockPool, OutOfBlocksError, blocks_for
from paged_engine.engine import Engine, EngineStatistics
from paged_engine.model import LlamaModel, ModelConfig
from paged_engine.sampling import GREEDY, Sampling

__all__ = [
    "GREEDY",
    "BlockId",
    "BlockPool",
    "Engine",
    "EngineStatistics",
    "LlamaModel",
    "ModelConfig",
    "OutOfBlocksError",
    "Sampling",
    "blocks_for",
]
