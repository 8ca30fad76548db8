"""Whole remote blocks, read into scratch memory: the alternative to reading small pieces.

If the pieces that are contiguous on both sides are small (for a head slice of NHD, from NHD to HND, or for HND with
different block sizes), a descriptor for each piece is slow. Instead, whole blocks are read into scratch memory, with
one descriptor for each region of a block, and copied into the cache from there. For NHD that also reads heads of the
peer that are not needed.

`prefer_scratch` decides which way is faster, by the costs of a descriptor and of a byte as measured over shared memory
and tcp (docs/decisions/0006-scratch.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvflow.core.cache.regions import Device, Regions
from kvflow.core.plan.block_map import BlockMap, Int64Array, regions_of
from kvflow.core.plan.descriptors import BlockIds, Descriptors
from kvflow.core.plan.topology import HeadSource


class PathCosts(NamedTuple):
    """Costs of a read in seconds: per descriptor, per byte, and for the copy from scratch memory."""

    descriptor_s: float
    byte_s: float
    permuted_byte_s: float
    """Seconds to copy a byte from scratch memory to the cache."""
    batch_s: float = 100e-6
    """Seconds lost for each scratch buffer that is filled, by waiting for its reads and starting its copy."""


COSTS: Mapping[tuple[str, bool], PathCosts] = {
    # Shared memory and tcp: measured, and a compromise between the two (docs/decisions/0006-scratch.md).
    ("cpu", True): PathCosts(2e-6, 0.2e-9, 0.045e-9),
    ("cpu", False): PathCosts(2e-6, 0.2e-9, 0.045e-9),
    # cuda_ipc posts a copy and an event for each piece; RDMA posts work requests. Taken from UCX's source and from
    # publications, not measured: `python3 dev.py gpu` measures them (docs/decisions/0019-device.md).
    ("cuda", True): PathCosts(4e-6, 0.003e-9, 0.001e-9),
    ("cuda", False): PathCosts(0.25e-6, 0.02e-9, 0.001e-9),
}
"""Costs, by (kind of device memory that is read into, whether the peer is on this host)."""


class WholeBlocks:
    """Where whole blocks of a peer lie, and the descriptors to read them. A block is one piece in each of its regions.

    A piece has `tokens` tokens of `heads` heads, in the peer's memory order, without gaps.
    """

    def __init__(self, remote: Regions, heads: HeadSource, layers: Sequence[int]) -> None:
        """`remote`: the peer's regions. `heads`: which heads to read.

        `layers`: indexes of the layers to read, among the peer's, in the order of their pieces in scratch memory.
        """
        block = remote.block
        index = regions_of(layers, len(remote.planes))
        self._bases: Int64Array = remote.bases[index].astype(np.int64)
        self._strides: Int64Array = remote.strides[index].astype(np.int64)
        self._device = remote.device
        self.tokens, self.run_bytes = block.tokens, block.run
        if block.head_stride == block.tokens * block.run and block.token_stride == block.run:
            self.memory_order, self.heads, self.first_head = "HND", heads.heads, 0
            self._bases += heads.remote_start * block.head_stride
        else:  # all heads are read: `first_head` is the first one that is needed
            self.memory_order, self.heads, self.first_head = "NHD", block.heads, heads.remote_start
        self.extent_bytes = self.tokens * self.heads * self.run_bytes

    def __len__(self) -> int:
        return len(self._bases)

    @property
    def block_bytes(self) -> int:
        """Number of bytes of scratch memory that one block takes, over all of its regions."""
        return len(self) * self.extent_bytes

    def plan(self, block_ids: BlockIds, scratch: int, device: Device) -> Descriptors:
        """Return descriptors that read the remote blocks `block_ids` to the local address `scratch` on `device`.

        From that address on the pieces lie without gaps: all blocks of the first region, then all blocks of the second,
        and so on.
        """
        count = len(self) * len(block_ids)
        table = np.empty((2, count, 3), dtype=np.int64)
        table[0, :, 0] = scratch + np.arange(count, dtype=np.int64) * self.extent_bytes
        remote = self._bases[:, None] + self._strides[:, None] * block_ids
        table[1, :, 0] = remote.ravel()
        table[:, :, 1] = self.extent_bytes
        table[0, :, 2], table[1, :, 2] = device.number, self._device.number
        return Descriptors(
            table=table.view(np.uint64),
            size_bytes=count * self.extent_bytes,
            local_device=device,
            remote_device=self._device,
        )


def prefer_scratch(
    block_map: BlockMap, whole_blocks: WholeBlocks, *, chunks: int, blocks: int, batches: int, near: bool
) -> bool:
    """Return whether reading whole remote blocks and permuting them is faster than reading every piece.

    `chunks`: number of chunks to copy from scratch memory; a chunk has as many tokens as the smaller of a local and a
    remote block. `blocks`: number of whole remote blocks to read. `batches`: number of scratch buffers to fill and
    copy. `near`: True if the peer is on this host.
    """
    costs = COSTS.get((block_map.local.device.kind, near), COSTS["cpu", near])
    groups = block_map.region_maps(block_map.chunk_tokens)
    pieces = chunks * sum(group.pieces for group in groups)
    size_bytes = chunks * sum(group.chunk_size_bytes for group in groups)
    direct_s = pieces * costs.descriptor_s + size_bytes * costs.byte_s
    read_s = blocks * (len(whole_blocks) * costs.descriptor_s + whole_blocks.block_bytes * costs.byte_s)
    return read_s + size_bytes * costs.permuted_byte_s + batches * costs.batch_s < direct_s
