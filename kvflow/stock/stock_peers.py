"""StockPeers: the part of a runtime that exchanges blocks with stock engines, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from msgspec import Meta

from kvflow import checks
from kvflow.core.bounds import Name, RankCount
from kvflow.core.cache.tensors import NAMED_LAYERS_MAX
from kvflow.core.protocol import messages
from kvflow.errors import ConfigError
from kvflow.runtime.part import Part, ReaderService
from kvflow.runtime.peers.handshake import Handshakes
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.peers.ticket_resolver import TicketResolver
from kvflow.runtime.producer.serving import Serving
from kvflow.runtime.rank import RankContext
from kvflow.stock.deadline import Terms
from kvflow.stock.engine_ranks import EngineRanks
from kvflow.stock.service import StockService, metadata_for_readers
from kvflow.stock.stock_handshake import StockHandshakes
from kvflow.stock.stock_resolver import StockResolver
from kvflow.stock.versions import HASH, ReleaseLine, line_of
from kvflow.transport.base import Transport

Hashes: TypeAlias = Annotated[
    tuple[Annotated[str, Meta(pattern=rf"\A{HASH.pattern}\Z")], ...], Meta(max_length=1 << 10)
]
Names: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=NAMED_LAYERS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StockPeers(Part):
    """Lets a runtime read from stock engines and serve stock readers: an item of `Runtime(parts=[...])`.

    The exchange is as safe as between two stock engines: neither side proves its identity, and a read from a stock
    engine succeeds by computed times (`Terms`), not by a seal. Loads from kvflow's own engines keep all their promises.
    A ConfigError says which field is invalid.
    """

    name = "stock"
    hashes: Hashes = ()
    """vLLM's compatibility hashes of the stock engines to read from; others are refused. Answers to stock readers have
    the first hash. `kvflow doctor --stock` prints an engine's hash."""
    terms: Terms = field(default_factory=Terms)
    tp_sizes: tuple[RankCount, ...] = ()
    """Tensor-parallel sizes of the stock engines to read from. Needed where the number of KV heads on an engine's first
    rank does not prove the size, as when ranks have copies of the same heads."""
    serve_version: Name = ""
    """vLLM version of the stock readers, for example "0.32.0". If empty, stock readers are not served."""
    attn_backend_name: Name = ""
    """Name of the attention backend in answers to stock readers, which compare it with their own."""
    region_names: Names = ()
    """Layer names in answers to stock readers, in order of the layers' numbers. If empty, answers have no names."""
    ranks: EngineRanks | None = None
    """Metadata of all ranks of this engine; needed if an engine of several ranks serves stock readers."""
    on_late_read: Callable[[str], None] | None = None
    """Function that is called, with the request id, on the runtime's event loop whenever a stock reader reports a
    request as read after the end of the lease."""

    def __post_init__(self) -> None:
        checks.normalize_fields(self, ConfigError, "stock ")
        if not self.hashes:
            raise ConfigError("stock hashes: expected one or more, got none")
        if self.on_late_read is not None and not callable(self.on_late_read):
            raise ConfigError(f"stock on_late_read: expected a function, got {checks.short_repr(self.on_late_read)}")
        if self.serve_version:
            line_of(self.serve_version, ConfigError)

    @property
    def serve_line(self) -> ReleaseLine:
        """Release line of vLLM that `serve_version` belongs to."""
        return line_of(self.serve_version, ConfigError)

    def handshakes(self, context: RankContext, transport: Transport, own: Handshakes) -> StockHandshakes:
        """Only for the runtime: return the object that does this rank's handshakes with kvflow and stock peers.

        It leaves handshakes with kvflow peers to `own`. ConfigError if a NixlConnector cannot read or offer this cache.
        """
        return StockHandshakes(context, transport, own, hashes=self.hashes, tp_sizes=self.tp_sizes, terms=self.terms)

    def resolver(self, context: RankContext, peers: Peers, own: TicketResolver) -> StockResolver:
        """Only for the runtime: return the resolver for tickets of kvflow's own engines and of stock engines."""
        handshakes = peers.handshakes
        assert isinstance(handshakes, StockHandshakes), "as they were given"
        return StockResolver(context, peers, own, handshakes)

    def reader_service(
        self, context: RankContext, serving: Serving, metadata: messages.Metadata
    ) -> ReaderService | None:
        """Only for the runtime: return the service that answers stock readers; None if `serve_version` is empty.

        Raises:
            ConfigError: stock readers cannot be served. Possible reasons: they cannot read this cache; CURVE is on, and
                vLLM has no CURVE; the engine has several ranks, and `ranks` is None.
        """
        config = context.config
        if not self.serve_version:
            return None
        if metadata.staged or config.curve_secret_key_file is not None:
            why = "a cache that peers read directly, and without CURVE, which vLLM does not have"
            raise ConfigError(f"stock serve_version: stock readers need {why}")
        if config.tp_size > 1 and self.ranks is None:
            why = f"tp_size is {config.tp_size}: one rank answers for all, so StockPeers needs `ranks` (EngineRanks)"
            raise ConfigError(f"stock serve_version: {why}")
        line = self.serve_line
        shown = metadata_for_readers(
            context.local,
            metadata,
            line,
            region_names=self.region_names,
            attn_backend_name=self.attn_backend_name,
        )
        return StockService(
            context,
            serving,
            shown,
            hash_text=self.hashes[0],
            line=line,
            ranks=self.ranks,
            on_late_read=self.on_late_read,
        )
