"""The scheduler's role: vLLM's requests and steps in the words of `connector.scheduler`, and its answers in vLLM's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvflow.connector.scheduler import ConnectorScheduler, Scheduled
from kvflow.connector.step import Step
from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.errors import RequestError
from kvflow.vllm.settings import scheduling_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvflow")

_COMPLETED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerHalf:
    """Lives in the engine core, beside vLLM's scheduler."""

    def __init__(self, vllm_config: VllmConfig, block_size: int) -> None:
        config = scheduling_of(vllm_config, block_size=block_size)
        self._scheduler = ConnectorScheduler(config, new_secret=lambda: secrets.token_hex(16))

    def introduce(self, tickets: Iterable[Ticket]) -> None:
        self._scheduler.introduce(merge_tickets(list(tickets)))

    def add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except RequestError as error:
            logger.warning("request %s: its prompt is computed here: %s", request.request_id, error)

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return self._scheduler.num_new_matched_tokens(request.request_id, num_computed_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.update_after_alloc(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def step(self, output: SchedulerOutput) -> Step:
        resolve = output.kv_connector_block_state.resolve_block_ids
        return self._scheduler.build_step(
            _scheduled(output),
            preempted=output.preempted_req_ids or (),
            block_ids=lambda request_id: resolve(request_id)[0],
            now_s=time.monotonic(),
        )

    def ended(self, output: KVConnectorOutput) -> None:
        self._scheduler.update_from_workers(received=output.finished_recving or (), sent=output.finished_sending or ())

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        completed = request.status in _COMPLETED
        return self._scheduler.request_finished(request.request_id, completed=completed, now_s=time.monotonic())

    def withdraw_all(self) -> None:
        self._scheduler.withdraw_all()


def _scheduled(output: SchedulerOutput) -> Iterator[Scheduled]:
    """Every request of the step, with the tokens that it will have computed."""
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield Scheduled(new.req_id, new.num_computed_tokens + tokens[new.req_id])
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield Scheduled(request_id, computed + tokens[request_id])
