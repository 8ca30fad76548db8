"""StockPeers: facts about the stock engines of a fleet, and the parts of a runtime that deal with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from msgspec import Meta

from kvflow import checks
from kvflow.core.bounds import Name, RankCount
from kvflow.core.cache.tensors import NAMED_LAYERS_MAX
from kvflow.errors import ConfigError
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.part import Foreign, Service
from kvflow.runtime.peers.handshake import Handshakes
from kvflow.stock.deadline import Terms
from kvflow.stock.engine_ranks import EngineRanks
from kvflow.stock.service import StockService
from kvflow.stock.stock_handshake import StockHandshakes
from kvflow.stock.stock_resolver import StockResolver
from kvflow.stock.versions import HASH, Line, line_of

Hashes: TypeAlias = Annotated[
    tuple[Annotated[str, Meta(pattern=rf"\A{HASH.pattern}\Z")], ...], Meta(max_length=1 << 10)
]
Names: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=NAMED_LAYERS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StockPeers(Foreign):
    """The stock engines that a runtime reads from, and is read by: a part of it. ConfigError names a bad field.

    It takes part in what stock engines do, so it is as safe as they are: neither side proves who it is, and what is
    read from one is believed by arithmetic (`Terms`). Loads from engines of our own make lose nothing.
    """

    name = "stock"
    hashes: Hashes = ()
    """The compatibility hashes of engines that are read from: whoever shows another one is refused. The first one is
    shown to readers. `kvflow doctor --stock` says which one an engine has."""
    terms: Terms = field(default_factory=Terms)
    tp_sizes: tuple[RankCount, ...] = ()
    """Sizes of tensor parallelism that there are. One that the heads of a first rank prove need not be named."""
    serve_version: Name = ""
    """The version of vLLM whose engines read from this one, such as "0.32.0"; without it none is served."""
    attn_backend_name: Name = ""
    """Name that readers are shown, which compare it with theirs."""
    region_names: Names = ()
    """Names of all layers that readers are shown, in the order of the layers' numbers; () shows none."""
    ranks: EngineRanks | None = None
    """Facts that the ranks of an engine of several ranks, which is read by others, know of each other."""
    on_late_read: Callable[[str], None] | None = None
    """Called, on the runtime's loop, with each request that a reader says to have read when its lease was over."""

    def __post_init__(self) -> None:
        checks.settle(self, ConfigError, "stock ")
        if not self.hashes:
            raise ConfigError("stock hashes: expected one or more, got none")
        if self.on_late_read is not None and not callable(self.on_late_read):
            raise ConfigError(f"stock on_late_read: expected a function, got {checks.shown(self.on_late_read)}")
        if self.serve_version:
            line_of(self.serve_version, ConfigError)

    @property
    def serve_line(self) -> Line:
        """Line of versions whose readers are served."""
        return line_of(self.serve_version, ConfigError)

    def handshakes(self, cache: RegisteredCache, own: Handshakes) -> StockHandshakes:
        """For the runtime: see `runtime.part.Foreign`.

        Args:
            cache: the rank's, as it is being registered.
            own: how engines of our own make are asked.

        Returns:
            How engines of both makes are asked who they are.

        Raises:
            ConfigError: the cache is not exchanged with stock engines.
        """
        return StockHandshakes(cache, own, self)

    def resolver(self, cache: RegisteredCache) -> StockResolver:
        """For the runtime: see `runtime.part.Foreign`.

        Args:
            cache: the rank's, as it is being registered.

        Returns:
            The way from tickets of both makes.
        """
        handshakes = cache.peers.handshakes
        assert isinstance(handshakes, StockHandshakes), "as they were given"
        return StockResolver(cache, handshakes)

    def service(self, cache: RegisteredCache) -> Service | None:
        """For the runtime: see `runtime.part.Foreign`.

        Args:
            cache: the rank's, as it is being registered.

        Returns:
            Who answers stock readers; None without `serve_version`.

        Raises:
            ConfigError: they cannot be served from this cache, with CURVE, or by several ranks without `ranks`.
        """
        config = cache.config
        if not self.serve_version:
            return None
        if cache.metadata.staged or config.curve_secret_key_file is not None:
            why = "a cache that peers read itself, and no CURVE: vLLM's readers have none"
            raise ConfigError(f"stock serve_version: stock readers are served with {why}")
        if config.tp_size > 1 and self.ranks is None:
            why = f"tp_size is {config.tp_size}: one rank answers for all, so StockPeers needs `ranks` (EngineRanks)"
            raise ConfigError(f"stock serve_version: {why}")
        return StockService(cache, self)
