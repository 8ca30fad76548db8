"""StockService: answers the questions of stock readers, and takes their notifications about this rank's leases.

A stock reader trusts every answer. So an answer has exactly the fields of the reader's own release line. A stock
reader's notification names a lease only by the request id, which therefore has to be secret.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvflow.checks import counted
from kvflow.core.bounds import LEASE_ID_CHARS
from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Regions
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.codec import WireError
from kvflow.core.protocol.notifications import ReadDone, Renew
from kvflow.errors import ConfigError
from kvflow.logs import logger_of
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.producer.serving import Serving
from kvflow.runtime.rank import RankContext
from kvflow.stock.engine_ranks import EngineRanks
from kvflow.stock.metadata_conversion import our_cache
from kvflow.stock.texts import decode_text, is_text
from kvflow.stock.versions import ReleaseLine
from kvflow.stock.wire import StockMetadata, decode_question, encode_answer, encode_metadata

logger = logger_of(__name__)

_REPORTED_MAX = 1 << 14
_NAME_CHARS_SHOWN = 200
_WARN_AGAIN_S = 1.0
_UNKNOWN_LEASE_ID = "f" * LEASE_ID_CHARS
_MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}


class StockService:
    """Answers stock readers' questions about all ranks of the engine, and takes their notifications to this rank.

    Implements `runtime.part.ReaderService`.
    """

    def __init__(
        self,
        context: RankContext,
        serving: Serving,
        metadata: StockMetadata,
        *,
        hash_text: str,
        line: ReleaseLine,
        ranks: EngineRanks | None,
        on_late_read: Callable[[str], None] | None,
    ) -> None:
        """Give this rank's metadata for stock readers, encoded for the release line `line`, to `ranks`.

        `hash_text`: the compatibility hash in answers. `ranks`, `on_late_read`: settings of `StockPeers`.
        """
        self._clock = context.clock
        self._leases = serving
        self._hash = hash_text
        self._reports_tp_size = line.reports_tp_size
        self._tp_size = context.config.tp_size
        self._ranks = EngineRanks() if ranks is None else ranks
        self._on_late_read = on_late_read
        self._late_reads = 0
        self._warned_s = -math.inf
        config = context.config
        self._ranks.begin(config.engine_id, config.tp_rank, config.tp_size, encode_metadata(metadata, line))
        self._reports = BoundedMap[str, tuple[int, int]](_REPORTED_MAX)
        """For each lease that some, but not all, stock readers have reported as read: the number of reports to expect,
        which each report states, and the number of reports so far. Keyed by lease id."""
        self.refused = 0
        """Number of unanswered questions and dropped notifications."""

    def answer(self, question: bytes) -> list[bytes] | None:
        try:
            pp_rank, tp_rank = decode_question(question)
            metadata = None if pp_rank else self._ranks.metadata_of(tp_rank)
            if metadata is None:
                raise WireError(f"pp_rank {pp_rank}, tp_rank {tp_rank}: {self._ranks} has no such rank")
        except WireError as error:
            self.refused += 1
            logger.info("a stock reader's question has no answer: %s", error)
            return None
        return encode_answer(self._hash, metadata, self._clock.now_s())

    def apply_notification(self, payload: bytes) -> bool:
        if not is_text(payload):
            return False
        try:
            text = decode_text(payload)
        except WireError as error:
            self.refused += 1
            logger.info("dropped a stock reader's notification: %s", error)
            return True
        if text.readers:
            # Lines that report their tensor-parallel size: each of our ranks hears its share of the readers' ranks.
            readers = max(text.readers // self._tp_size, 1) if self._reports_tp_size else text.readers
            self._count_read_report(text.request_ids[0], readers)
        else:
            self._renew(text.request_ids)
        return True

    def _renew(self, request_ids: tuple[str, ...]) -> None:
        """Renew the leases of the requests that a stock reader's heartbeat names.

        If some of these requests have no lease, count one late notification for all, since a heartbeat may name
        thousands.
        """
        leased = {self._lease_id_of(request_id) or _UNKNOWN_LEASE_ID for request_id in request_ids}
        for lease_id in leased:
            self._leases.on_notification(codec.encode(Renew(lease_ids=(lease_id,), reader="stock")))

    def _lease_id_of(self, request_id: str) -> str | None:
        opened = self._leases.open_lease(request_id)
        return None if opened is None else opened.entry.lease_id

    def _count_read_report(self, request_id: str, readers: int) -> None:
        """Count a stock reader's report that it has read a request, and pass the report on to the request's lease.

        `readers` is the number of reports to expect. A report does not name its reader, so the lease gets the report's
        number as the reader's name.
        """
        lease_id = self._lease_id_of(request_id)
        if lease_id is None:
            self._note_late_read(request_id)
        known, reports = self._reports.pop(lease_id or "", (readers, 0))
        reports += known == readers
        if lease_id is not None and reports < known:
            self._reports[lease_id] = known, reports
        if known != readers:
            self.refused += 1
            logger.info("stock readers of one request report different numbers of readers: %s and %s", known, readers)
            return
        message = ReadDone(
            lease_ids=(lease_id or _UNKNOWN_LEASE_ID,), reader=f"stock {reports}", numerator=1, denominator=readers
        )
        self._leases.on_notification(codec.encode(message))

    def _note_late_read(self, request_id: str) -> None:
        """Count a stock reader's report of a read, for a request that has no lease now. Log at most one a second.

        The reader may have read another prompt's blocks, since it checks nothing, or it may have given up the request
        unread.
        """
        self._leases.part_counts["late_reads"] += 1
        self._late_reads += 1
        now_s = self._clock.now_s()
        if says := now_s >= self._warned_s + _WARN_AGAIN_S:
            self._warned_s = now_s
            logger.warning(
                "a stock reader has read request %s after its lease: if another prompt was in its blocks by then, its"
                " text is wrong (%s so far)",
                request_id[:_NAME_CHARS_SHOWN],
                counted(self._late_reads, "such read"),
            )
        if self._on_late_read is not None:
            try:
                self._on_late_read(request_id)
            except Exception as error:
                if says:
                    logger.error("on_late_read failed", exc_info=error)


def metadata_for_readers(
    local: LocalRank,
    metadata: messages.Metadata,
    line: ReleaseLine,
    *,
    region_names: Sequence[str],
    attn_backend_name: str,
) -> StockMetadata:
    """Return this rank's `metadata` in the form that stock readers of the release line `line` expect.

    `region_names`, `attn_backend_name`: settings of `StockPeers`. ConfigError if stock readers cannot read this cache.
    """
    ours = our_cache(local.cache_shares, local.regions, local.groups)
    for one in ours.layer_sets:
        if one.regions.planes not in (("KV",), ("latent",)):
            parts = one.regions.planes
            raise ConfigError(
                f"stock serve_version: stock readers need K and V in one tensor, ours are separate: {parts}"
            )
    if len(counts := {one.regions.num_blocks for one in ours.layer_sets}) > 1:
        raise ConfigError(
            f"stock serve_version: num_blocks of the groups: {sorted(counts)}, stock readers take one number"
        )
    regions, layers = ours.regions, sorted(ours.layers)
    if region_names and len(region_names) != len(layers):
        raise ConfigError(
            f"stock region_names: {len(region_names)}, expected one for each of {counted(len(layers), 'layer')}"
        )
    names = dict(zip(layers, region_names, strict=False))
    tables = [ours.layer_sets[which].regions for which, _ in (region.set_and_index for region in regions)]
    first = ours.layer_sets[0].regions
    return StockMetadata(
        engine_id=metadata.engine_id,
        agent_metadata=metadata.agent_metadata,
        kv_caches_base_addr=[ours.base_of(*region.set_and_index) for region in regions],
        device_id=first.device.number,
        num_blocks=first.num_blocks,
        block_lens=[table.block_size_bytes for table in tables],
        block_strides=[
            int(table.strides[region.set_and_index[1]]) for table, region in zip(tables, regions, strict=True)
        ],
        kv_cache_layout=_layout_name(first, line),
        block_size=first.block.tokens,
        ssm_sizes=(0, 0),
        attn_backend_name=attn_backend_name,
        physical_blocks_per_logical_kv_block=1,
        region_num_blocks=[first.num_blocks] * len(regions),
        region_group_ids=[region.group for region in regions],
        region_names=[names[region.layer] for region in regions] if names else None,
        region_mem_types=[_MEMORY[first.device.kind]] * len(regions),
    )


def _layout_name(regions: Regions, line: ReleaseLine) -> str:
    """Return vLLM's name, in release line `line`, for the order of heads and tokens inside a block."""
    block: BlockShape = regions.block
    heads_first = block.head_stride >= block.token_stride
    if line.number < (0, 29):
        return "HND" if heads_first else "NHD"
    return "LBHNC" if heads_first else "LBNHC"
