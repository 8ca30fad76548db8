"""What every element of a cache should be, by layer, part, head, token: a byte in the wrong place shows.

It is the same in every cut of a model: heads are counted over the model, tokens over the list of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

_PRIME = 65_521  # the largest below 2**16: neighbours in any axis differ


def write_pattern(caches: Mapping[str, torch.Tensor], block_ids: Sequence[int], first_head: int, order: str) -> None:
    """Give blocks (kv, block, ...) what tokens 0, 1, ... have, in the order of the list; waits for the device."""
    for layer, tensor in enumerate(caches.values()):
        index = torch.tensor(list(block_ids), device=tensor.device)
        tensor.view(torch.int16)[:, index] = _expected(layer, tensor, len(block_ids), first_head, order)
    _wait(caches)


def count_wrong(caches: Mapping[str, torch.Tensor], block_ids: Sequence[int], first_head: int, order: str) -> int:
    """How many elements of these blocks are not as `write_pattern` would write them."""
    wrong = 0
    for layer, tensor in enumerate(caches.values()):
        index = torch.tensor(list(block_ids), device=tensor.device)
        expected = _expected(layer, tensor, len(block_ids), first_head, order)
        wrong += int((tensor.view(torch.int16)[:, index] != expected).sum())
    return wrong


def _expected(layer: int, tensor: torch.Tensor, blocks: int, first_head: int, order: str) -> torch.Tensor:
    hnd = order == "HND"
    heads, tokens = tensor.shape[2:4] if hnd else (tensor.shape[3], tensor.shape[2])
    words = torch.arange(2).view(2, 1, 1, 1, 1) + 2 * layer
    words = words * 31 + torch.arange(first_head, first_head + heads).view(1, 1, heads, 1, 1)
    words = words * 4099 + torch.arange(blocks * tokens).view(1, blocks, 1, tokens, 1)
    words = words * 257 + torch.arange(tensor.shape[4])
    found = (words % _PRIME - (1 << 15)).to(torch.int16).to(tensor.device)
    return found if hnd else found.transpose(2, 3)


def _wait(caches: Mapping[str, torch.Tensor]) -> None:
    if next(iter(caches.values())).device.type == "cuda":
        torch.cuda.synchronize()
