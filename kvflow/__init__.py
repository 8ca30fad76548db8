"""kvflow: an asyncio-native runtime that moves paged KV cache between LLM engines.

The names in `__all__` of this package and of the modules in `__public_modules__` are public. Everything else may change
without notice.
"""

from kvflow import errors
from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup, GroupKind
from kvflow.core.cache.layout import CacheLayout, KVStyle
from kvflow.core.cache.state import Segment, StateLayout, StateTensor
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.policy.states import LeaseState
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket, merge_tickets
from kvflow.limits import Limits
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadReport, LoadRequest
from kvflow.runtime.part import Part
from kvflow.runtime.producer.lease import Lease, LeaseOutcome, ServeRequest
from kvflow.runtime.records import Attempt, LeaseRecord, LoadRecord, Observer
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.statistics import RuntimeState, RuntimeStatistics
from kvflow.secret_ids import secret_id

__version__ = "0.1.0"
__public_modules__ = (
    "kvflow",
    "kvflow.blocking",
    "kvflow.connector.parameters",
    "kvflow.connector.scheduler",
    "kvflow.connector.worker",
    "kvflow.prefix",
    "kvflow.prefix.kv_events",
    "kvflow.prefix.testing",
    "kvflow.observe.opentelemetry",
    "kvflow.observe.prometheus",
    "kvflow.observe.timeline",
    "kvflow.ray",
    "kvflow.stock",
    "kvflow.storage",
    "kvflow.testing",
    "kvflow.vllm",
)

__all__ = [
    "Attempt",
    "CacheGroup",
    "CacheLayout",
    "Config",
    "DeviceEvent",
    "GroupKind",
    "KVStyle",
    "Lease",
    "LeaseOutcome",
    "LeaseRecord",
    "LeaseState",
    "Limits",
    "Load",
    "LoadRecord",
    "LoadReport",
    "LoadRequest",
    "Observer",
    "Part",
    "PeerAddress",
    "Rank",
    "Runtime",
    "RuntimeState",
    "RuntimeStatistics",
    "Segment",
    "ServeRequest",
    "StateLayout",
    "StateTensor",
    "Ticket",
    "errors",
    "merge_tickets",
    "secret_id",
]
