"""What kvflow's connector does in each of vLLM's workers, over a `connector.worker.ConnectorWorker` and its runtime.

The runtime has a thread of its own, so transfers continue while no step runs. A step that computes tokens never waits
for a load, only for the end of leases of blocks that it will overwrite (`handle_preemptions`).

A worker refuses to start with unknown kinds of caches (see `kv_cache_layout`), and with caches on a device that the
transport cannot reach.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from kvflow.blocking import Runtime
from kvflow.checks import counted
from kvflow.connector.paged_groups import as_registered
from kvflow.connector.step import Step
from kvflow.connector.worker import ConnectorWorker, Results
from kvflow.core.cache.regions import Device
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError, KVFlowError
from kvflow.logs import logger_of
from kvflow.parts import importing_part
from kvflow.runtime.part import Part
from kvflow.transport.device.cache_device import record_event
from kvflow.vllm.extra_config import PREFIX_SETTINGS, Extra, config_of, unmapping_option
from kvflow.vllm.kv_cache_layout import Group, cache_groups
from kvflow.vllm.messages import KVFlowIntroduction, KVFlowMetadata, KVFlowWorkerReport
from kvflow.vllm.vllm_metrics import KVFlowStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvflow.connector.prefix_peers import PrefixPeers
    from kvflow.stock import EngineRanks

logger = logger_of("vllm.kvflow")

# vLLM 0.33 and later call workers before they unmap the cache's memory, and after they have mapped it again.
_NOTIFIES_OF_SLEEP = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
# vLLM steps again and again while a load or a lease is under way, and looks for new requests only between two steps. So
# a step that computes nothing waits for a result: first briefly, then longer, since each step takes the processor from
# the load itself, or from another engine of this machine.
_IDLE_STEP_S, _IDLE_STEP_MAX_S = 0.002, 0.010


def worker_side_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: Sequence[Group], extra: Extra
) -> WorkerSide:
    """Return a `WorkerSide` as the configuration asks for it. ConfigError if that is not possible."""
    config = config_of(vllm_config, tp_rank=get_tensor_model_parallel_rank(), pp_rank=get_pp_group().rank_in_group)
    parts, late_reads, ranks, peers = list[Part](), deque[str](), None, None
    if extra.stock_peers:
        with importing_part("stock", "stock_peers", ConfigError):
            from kvflow.vllm import stock_settings

        stock_peers = stock_settings.peers_of(vllm_config, extra, late_reads.append)
        ranks = stock_peers.ranks
        parts.append(stock_peers)
    shares = pulls = False
    if extra.uses_prefixes:
        with importing_part("prefix", PREFIX_SETTINGS, ConfigError):
            from kvflow.vllm import prefix

        peers = prefix.prefix_peers_of(vllm_config, extra)
        parts.append(peers.prefixes)
        possible = not prefix.sharing_obstacle(groups, kv_cache_config)
        shares, pulls = extra.share_prefixes and possible, extra.pulls_prefixes and possible
    return WorkerSide(
        vllm_config,
        Runtime(config, parts=parts),
        groups,
        peers,
        ranks=ranks,
        late_reads=late_reads,
        shares_prefixes=shares,
        pulls_prefixes=pulls,
        kv_format=extra.kv_format,
    )


class WorkerSide:
    """kvflow's connector in one of vLLM's workers. vLLM's base class says when each method is called.

    Args:
        vllm_config: vLLM's configuration.
        runtime: the rank's runtime. `register_kv_caches` opens it, `shutdown` closes it.
        groups: the groups of layers that are transferred.
        peers: the peers to ask for prefixes, and to share prefixes with; None to do neither.
        ranks: metadata of all ranks of this engine for stock readers; None if `stock_peers` is off.
        late_reads: queue to which the part `stock` adds the request id of each late read by a stock engine.
        shares_prefixes: peers may read prefixes from this engine's cache.
        pulls_prefixes: this engine asks peers for prefixes, and loads them.
        kv_format: name of the cache's format, if the user has given it one.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        runtime: Runtime,
        groups: Sequence[Group],
        peers: PrefixPeers | None = None,
        *,
        ranks: EngineRanks | None = None,
        late_reads: deque[str] | None = None,
        shares_prefixes: bool = False,
        pulls_prefixes: bool = False,
        kv_format: str | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._runtime = runtime
        self._groups = groups
        self._worker = ConnectorWorker(runtime, peers)
        self._ranks = ranks
        self._late_reads = deque() if late_reads is None else late_reads
        self._shares_prefixes = shares_prefixes
        self._pulls_prefixes = pulls_prefixes
        self._kv_format = kv_format
        # One rank asks peers for prefixes on behalf of the whole engine.
        self._asks_for_engine = (runtime.config.tp_rank, runtime.config.pp_rank) == (0, 0)
        self.stats = KVFlowStats()
        self._report = KVFlowWorkerReport()
        """Report that goes out with the results of the next step."""
        self._successor: Ticket | None = None
        """A ticket of the server that takes this one's place; None unless an operator has named it."""
        self._registered = False
        """True while the cache is registered: from its first registration, but for vLLM's sleep."""
        self._device: Device | None = None
        """Device of the cache, on which events are recorded; None on the CPU."""
        self._before_step: DeviceEvent | None = None
        """Event that happens when all work of earlier steps is done; None on the CPU."""
        self._idle_step_s = _IDLE_STEP_S
        """Seconds for which the next step waits for a result if it computes nothing."""
        self._failed_blocks: set[int] = set()
        """vLLM's ids of blocks of failed loads that vLLM has not asked for yet."""
        self._split = 1
        """Number of registered blocks in a block of vLLM's."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        where = next(iter(kv_caches.values())).device
        device = where.type
        model, buffer_device = self._vllm_config.model_config, self._vllm_config.kv_transfer_config.kv_buffer_device
        if buffer_device not in (device, "cpu"):
            raise ConfigError(f"KVFlowConnector: kv_buffer_device is {buffer_device!r}, the cache is on {device!r}")
        unmapping = unmapping_option(model)
        if unmapping is not None and device != "cpu" and not _NOTIFIES_OF_SLEEP:
            # After a sleep the same addresses are mapped to other memory; the old memory would still be registered.
            raise ConfigError(
                f"KVFlowConnector: {unmapping} is on, and the cache is on {device!r}: vLLM before 0.33 does not notify "
                "connectors when it unmaps a cache, so peers would read other memory. Leave it off, or use vLLM 0.33"
            )
        groups = cache_groups(kv_caches, self._groups, self._vllm_config, kv_format=self._kv_format)
        self._split = groups[0].split
        if self._ranks is not None and any(group.split > 1 for group in groups):
            what = f"a block of vLLM's is {counted(self._split, 'block')} of its kernels"
            raise ConfigError(f"KVFlowConnector: stock_peers: {what}, which stock engines count differently")
        self._device = None if device == "cpu" else Device(device, where.index or 0)
        self._cache_groups = groups
        self._runtime.open()
        self._register(follow_events=self._asks_for_engine)

    def _register(self, *, follow_events: bool) -> None:
        """Register the cache and, as configured, share prefixes from it and connect to peers.

        `follow_events`: begin to receive KV events, which goes on until the runtime closes.
        """
        self._runtime.register_kv_caches(self._cache_groups)
        if self._shares_prefixes:
            size, pairs = self._groups[0].facts.block_size, zip(self._groups, self._cache_groups, strict=True)
            self._worker.share([as_registered(group.facts, size // cache.split) for group, cache in pairs], size)
        if self._pulls_prefixes:
            self._worker.connect_peers(follow_events=follow_events)
        self._registered = True

    def unregister_kv_caches(self) -> None:
        """Unregister the cache, before vLLM unmaps its memory: afterwards kvflow reads and writes nothing there.

        Steps without requests may follow before `restore_kv_caches`. A second call does nothing.
        """
        self._registered = False
        self._runtime.unregister()

    def restore_kv_caches(self) -> None:
        """Register the cache again, once vLLM has mapped its memory. A second call does nothing.

        Before its next step, vLLM passes the workers' new introductions to the scheduler's connector object.
        """
        if not self._registered:
            self._register(follow_events=False)

    def build_connector_worker_meta(self) -> KVFlowWorkerReport | None:
        report, self._report = self._report, KVFlowWorkerReport()
        return report if report != KVFlowWorkerReport() else None

    def get_handshake_metadata(self) -> KVFlowIntroduction:
        card = b"" if self._ranks is None else self._ranks.card
        return KVFlowIntroduction(self._worker.introduction(), card)

    def handle_preemptions(self, metadata: KVFlowMetadata) -> None:
        """End all reads, by peers, of blocks that this step will overwrite, and send the step's questions to peers.

        vLLM calls this before the step writes any block.
        """
        step, self._successor = metadata.step, metadata.successor or self._successor
        ready = self._record_event() if step.save_cached else None
        self._worker.prepare(
            step if self._asks_for_engine else msgspec.structs.replace(step, questions=[]), ready=ready
        )

    def begin_step(self, metadata: KVFlowMetadata) -> None:
        """Record a device event that happens when all work of earlier steps is done.

        The loads of the step that begins wait for this event before they write.
        """
        self._before_step = self._record_event()
        if self._ranks is not None and metadata.cards:
            self._ranks.show(metadata.cards)

    def start_load_kv(self, step: Step) -> None:
        """Start the step's loads, end leases, and do all other work that does not need the results of this step."""
        prepared: dict[str, Any] = {"reused": (), "recall": [], "questions": [], "save_cached": []}
        begun = msgspec.structs.replace(step, save=[], grow=[], cached_blocks=[], **prepared)
        self._worker.begin(begun, after=self._before_step)

    def wait_for_save(self, step: Step) -> None:
        """Open and extend leases of the blocks that the step computes. Despite the method's name, do not wait.

        The leases get a device event that happens once the submitted forward pass is done. Readers wait for that event.
        """
        saved = Step(save=step.save, grow=step.grow, cached_blocks=step.cached_blocks)
        self._worker.begin(saved, ready=self._record_event())

    def collect(self, *, idle: bool) -> Results:
        """Return the loads and leases that have ended since the last step.

        `idle`: the engine computes nothing in this step, so wait for a moment if there are none yet.
        """
        results = self._worker.collect(self._idle_step_s if idle else 0.0)
        waited_in_vain = idle and results == Results()
        self._idle_step_s = min(2 * self._idle_step_s, _IDLE_STEP_MAX_S) if waited_in_vain else _IDLE_STEP_S
        self._report = self._report.aggregate(
            KVFlowWorkerReport(found=results.found, refused=results.refused, offered=tuple(results.offered))
        )
        self.stats.add_results(results)
        self.stats.data["prefix_runs"] += self._worker.shared_outcomes()
        while self._late_reads:
            self._late_reads.popleft()
            self.stats.data["late_reads"].append("stock")
        if len(self._groups) == 1:  # with several, vLLM cannot assign a block to a group: it computes the whole prompt
            failed = (block for load in results.failed.values() for block in load.block_tables[0])
            self._failed_blocks.update(block // self._split for block in failed)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def note_new_weights(self, version: str) -> None:
        """Announce that vLLM has other weights (`kvflow.vllm.weights`)."""
        self._worker.set_weights(version)

    def shutdown(self) -> None:
        if self._successor is not None:  # readers that wait here are sent there, and goodbyes name it
            try:
                self._runtime.drain(successor=self._successor)
            except (KVFlowError, TimeoutError) as error:
                logger.warning("the server that takes this one's place is not named to readers: %s", error)
        self._runtime.close()

    def _record_event(self) -> DeviceEvent | None:
        """Return a new device event that happens once all work submitted so far is done. None on the CPU."""
        return None if self._device is None else record_event(self._device)
