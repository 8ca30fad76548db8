"""Who takes part: for each contender a producer and a reader process on one transport, connected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from kvflow.cli.bench.children import Body, Child, Pair
from kvflow.cli.bench.hop import HopReader
from kvflow.cli.bench.messages import Connect, Done, PeerAddress
from kvflow.cli.bench.raw_child import RawProducer, RawReader
from kvflow.cli.bench.samples import Contender
from kvflow.cli.bench.settings import CacheShape, Transport

# None removes a variable, so that what the caller has set does not choose the transport instead of us.
_ENVIRONMENTS: Mapping[Transport, Mapping[str, str | None]] = {
    Transport.SHM: {"UCX_TLS": None},
    Transport.TCP: {"UCX_TLS": "tcp"},
}
_QUIET: Mapping[str, str | None] = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}


def environment_of(transport: Transport) -> Mapping[str, str | None]:
    """What a child's environment has to say for its bytes to go this way."""
    return {**_QUIET, **_ENVIRONMENTS[transport]}


@contextlib.contextmanager
def open_pairs(transport: Transport, shape: CacheShape) -> Iterator[Mapping[Contender, Pair]]:
    """Start all contenders; at the end of the block all their processes are gone."""
    environment = environment_of(transport)
    with contextlib.ExitStack() as stack:
        yield {contender: _open_pair(stack, contender, shape, environment) for contender in Contender}


def _open_pair(
    stack: contextlib.ExitStack, contender: Contender, shape: CacheShape, environment: Mapping[str, str | None]
) -> Pair:
    """Start and connect one pair; if it spins it sleeps when this returns."""
    producer_body, reader_body = _bodies(contender, shape)
    producer = stack.enter_context(contextlib.closing(Child(f"{contender} producer", producer_body, environment)))
    reader = stack.enter_context(contextlib.closing(Child(f"{contender} reader", reader_body, environment)))
    pair = Pair(producer, reader, spins=contender is Contender.EXAMPLE)
    # Closing goes backwards. The producer must make progress when its reader leaves: otherwise it may die of it (tcp).
    stack.callback(pair.wake)
    with pair.awake():
        address = producer.receive(PeerAddress)
        reader.ask(Connect(address=address, producer_pid=producer.pid), Done)
    return pair


def _bodies(contender: Contender, shape: CacheShape) -> tuple[Body, Body]:
    if contender is Contender.KVFLOW:
        # Imported late: it imports torch, which the parent needs for nothing else.
        from kvflow.cli.bench.engine import EngineProducer, EngineReader

        return EngineProducer(shape=shape), EngineReader(shape=shape)
    if contender is Contender.HOP:
        return RawProducer(shape=shape, tuned=True), HopReader(shape=shape)
    tuned = contender is Contender.TUNED
    return RawProducer(shape=shape, tuned=tuned), RawReader(shape=shape, tuned=tuned)
