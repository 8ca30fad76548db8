"""Settings for stock peers (`stock_peers`), from vLLM's configuration and vLLM's own code for NixlConnector."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash

from kvflow.config import Config
from kvflow.connector.parameters import Dialect
from kvflow.connector.scheduler import SchedulingConfig
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, RequestError
from kvflow.stock import EngineRanks, StockPeers, Terms, arrival
from kvflow.stock.params import Registrations, freed_block, is_stock_params, make_stock_params, read_stock_params
from kvflow.vllm.extra_config import Extra

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_UNSAFE_CHARS = re.compile(r"[^!-+\--~]|:")


def peers_of(vllm_config: VllmConfig, extra: Extra, on_late_read: Callable[[str], None]) -> StockPeers:
    """Return the `StockPeers` for one rank, with the compatibility hash that the installed vLLM computes.

    If a stock reader's report of a read comes after the end of the lease, `on_late_read` is called with the request id.
    ConfigError names a wrong setting in `extra`.
    """
    backend = get_current_attn_backends(vllm_config)[0].get_name()
    own, stock = compute_nixl_compatibility_hash(vllm_config, backend), extra.stock
    shown = stock.serve_hash or own
    return StockPeers(
        hashes=tuple(dict.fromkeys((shown, own, *stock.hashes))),
        terms=Terms(lease_s=stock.lease_s, router_s=stock.router_s),
        tp_sizes=stock.tp_sizes,
        serve_version=_reader_version(extra),
        attn_backend_name=backend,
        ranks=EngineRanks(),
        on_late_read=on_late_read,
    )


def dialect_of(extra: Extra, config: Config, scheduling: SchedulingConfig) -> Dialect:
    """Return a Dialect for `kv_transfer_params` of both kvflow engines and stock engines.

    It reads tickets of both, and writes tickets that readers of both can use. ConfigError if the model or a setting
    does not allow the exchange with stock engines.
    """
    if scheduling.has_state:
        raise ConfigError("stock_peers: the model has state per request, which is not exchanged with stock engines")
    if scheduling.full_blocks_only:
        raise ConfigError(
            "stock_peers: only whole prompts are exchanged with stock engines: full_blocks_only must be off"
        )
    version, lease_s = _reader_version(extra), extra.stock.lease_s
    ids_max, groups = config.limits.block_ids_max, scheduling.all_groups
    left, registrations = int(scheduling.leaves_last_token), Registrations()

    def read_ticket(params: Mapping[str, Any]) -> Ticket:
        if not is_stock_params(params):
            return Ticket.from_params(params)
        ticket = read_stock_params(params, arrived=arrival(), lease_s=lease_s, block_ids_max=ids_max, left=left)
        if len(ticket.block_tables) != len(groups):
            theirs = len(ticket.block_tables)
            raise RequestError(f"stock params: groups of blocks: ours {len(groups)}, theirs {theirs}")
        for group, table in zip(groups, ticket.block_tables, strict=True):
            if (freed := freed_block(ticket, group, table)) is not None:
                raise RequestError(
                    f"stock params: block {freed} of group {group.name!r} is null: vLLM has freed it behind the window"
                )
        return ticket

    def params_of(ticket: Ticket) -> dict[str, Any]:
        return make_stock_params(ticket, version, left=left, generation=registrations.number_of(ticket))

    return Dialect(read_ticket, params_of, lambda request_id: _UNSAFE_CHARS.sub("_", request_id))


def _reader_version(extra: Extra) -> str:
    return extra.stock.serve_version or vllm.__version__
