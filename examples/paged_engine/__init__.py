"""A small paged engine for the examples: one Llama model, paged KV cache, sampling, asyncio.

It stands where a real engine would stand and knows nothing of kvflow. What an example needs of it:
`kv_caches` to register, `reserve` for blocks that live as long as a `with`, `prefill` and `decode`.
"""

from paged_engine.cache import BlockId, BlockPool, CacheShape, OutOfBlocksError, blocks_for
from paged_engine.engine import Engine, EngineStatistics
from paged_engine.model import LlamaModel, ModelConfig
from paged_engine.sampling import GREEDY, Sampling

__all__ = [
    "GREEDY",
    "BlockId",
    "BlockPool",
    "CacheShape",
    "Engine",
    "EngineStatistics",
    "LlamaModel",
    "ModelConfig",
    "OutOfBlocksError",
    "Sampling",
    "blocks_for",
]
