"""`kvflow selftest`: one process offers blocks, another loads them over NIXL, and every byte is compared.

There is no model: what the blocks hold is a pattern. It shows that an installation works. (A model that answers in two
processes is `python3 dev.py demo`, in a checkout.)
"""

from __future__ import annotations

from rich.console import Console

from kvflow.bench.cache import CacheShape
from kvflow.bench.engine import Consumers, EngineProducer, open_pair
from kvflow.bench.loads import Fabric, PlannedLoad, scattered
from kvflow.checks import counted, few

BLOCKS_MAX = 128
_SHAPE = CacheShape(layers=8, blocks=BLOCKS_MAX, kv_heads=4, head_size=64)


def hand_over(blocks: int, transport: Fabric, console: Console) -> None:
    """Start both engines, hand the blocks of one prompt over, report. BenchError if bytes differ, or anything fails."""
    theirs, ours = (scattered(side, BLOCKS_MAX, blocks) for side in ("prefill", "decode"))
    load = PlannedLoad(request_id="selftest-1", local_ids=ours, remote_ids=theirs)
    with open_pair(_SHAPE, transport.environment) as pair:
        prefill, decode = pair.producer, pair.consumer
        tickets = prefill.run(EngineProducer.offer, [load])
        console.print(f"prefill-0 (process {prefill.pid}) offers {counted(len(theirs), 'block')}: {few(theirs, 4)}")
        report = decode.run(Consumers.load, 0, load, tickets)
        console.print(f"decode-0 (process {decode.pid}) has loaded them over {transport} into {few(ours, 4)}:")
        pieces = counted(report.descriptors, "piece")
        console.print(f"  {report.size_bytes:,} bytes in {pieces}, {report.seconds * 1e3:.1f} ms")
        prefill.run(EngineProducer.settle)
        console.print("the lease ended as 'read': prefill-0 has its blocks back")
        decode.run(Consumers.check, 0, load, _SHAPE.block_size, range(_SHAPE.layers))
    console.print("every byte is equal", style="green")
