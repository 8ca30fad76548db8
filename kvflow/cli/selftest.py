"""`kvflow selftest`: one process offers blocks, another loads them over NIXL, and every byte is compared.

The test shows that an installation works, without a model. (`python3 dev.py demo`, in a checkout, runs a model in two
processes.)
"""

from __future__ import annotations

from rich.console import Console

from kvflow.bench.cache import CacheShape
from kvflow.bench.engine import EngineConsumer, EngineProducer, open_pair
from kvflow.bench.loads import Fabric, scattered_loads
from kvflow.checks import counted, first_few

BLOCKS_MAX = 128
_SHAPE = CacheShape(layers=8, blocks=BLOCKS_MAX, kv_heads=4, head_size=64)


def hand_over(blocks: int, transport: Fabric, console: Console) -> None:
    """Start two engines, load `blocks` blocks from one to the other, and print a report to `console`.

    Raise BenchError if a byte differs or a process fails.
    """
    (load,) = scattered_loads("selftest", BLOCKS_MAX, [blocks])
    with open_pair(_SHAPE, transport.environment) as (prefill, decode):
        tickets = prefill.run(EngineProducer.offer, [load])
        remote_ids, local_ids = first_few(load.remote_ids, 4), first_few(load.local_ids, 4)
        console.print(f"prefill-0 (process {prefill.pid}) offers {counted(blocks, 'block')}: {remote_ids}")
        (report,) = decode.run(EngineConsumer.load, [load], tickets)
        console.print(f"decode-0 (process {decode.pid}) has loaded them over {transport} into {local_ids}:")
        pieces = counted(report.descriptors, "piece")
        console.print(f"  {report.size_bytes:,} bytes in {pieces}, {report.seconds * 1e3:.1f} ms")
        prefill.run(EngineProducer.end_leases)
        console.print("the lease ended as 'read': prefill-0 has its blocks back")
    console.print("every byte is equal", style="green")
