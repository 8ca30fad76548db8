"""OpenTelemetry spans of loads and leases, joined by the trace context in the ticket; needs `kvflow[tracing]`.

    lease = runtime.serve_blocks(ServeRequest(..., traceparent=current_traceparent()))       # producer
    async with kvflow.Runtime(config, observers=[OpenTelemetrySpans()]) as runtime: ...      # both sides

The producer's "kvflow.lease" span and the consumer's "kvflow.load" span are children of the span that the ticket names,
so both engines show up in one trace. Spans are made from records, when a load or lease has ended, with the times that
they had. A load span links to the span that was current where the load was awaited.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvflow.core.policy.history import Moment
from kvflow.runtime.records import CANCELLED, LeaseRecord, LoadRecord

__all__ = ["OpenTelemetrySpans", "current_traceparent"]

_PROPAGATOR = TraceContextTextMapPropagator()
_NS = 1_000_000_000


def current_traceparent() -> str:
    """The current span as a W3C traceparent, for a ServeRequest.

    Returns:
        That of a new trace if no span is current.
    """
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    if "traceparent" in carrier:
        return carrier["traceparent"]
    made = RandomIdGenerator()
    return f"00-{made.generate_trace_id():032x}-{made.generate_span_id():016x}-01"


def _attributes(record: LoadRecord | LeaseRecord, *names: str) -> dict[str, str | int]:
    """Attributes of every span: a number for each way of splitting an engine among it, and these fields."""
    return {
        "kvflow.engine": record.engine_id,
        **{f"kvflow.{name}_rank": number for name, number in record.rank._asdict().items()},
        **{f"kvflow.{name}": getattr(record, name) for name in ("request_id", "outcome", "blocks", *names)},
    }


class OpenTelemetrySpans:
    """A `kvflow.Observer` that makes spans.

    Args:
        tracer: makes the spans; None takes the global provider's.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("kvflow")

    def load_ended(self, record: LoadRecord) -> None:
        """Make the spans of a load.

        Args:
            record: of the load, which has just ended.
        """
        here = trace.get_current_span().get_span_context()
        attributes = _attributes(record, "peer", "bytes", "descriptors", "verification", "freshness")
        attributes["kvflow.peer_engine"] = record.peer_engine_id
        failed = record.error or (record.outcome if record.outcome == CANCELLED else "")
        span_links = [Link(here)] if here.is_valid else []
        self._tell(record, attributes, SpanKind.CLIENT, span_links, failed, landed=record.landed)

    def lease_ended(self, record: LeaseRecord) -> None:
        """Make the spans of a lease.

        Args:
            record: of the lease, which has just ended.
        """
        self._tell(record, _attributes(record, "tokens", "readers"), SpanKind.SERVER, computed=record.computed)

    def _tell(
        self,
        record: LoadRecord | LeaseRecord,
        attributes: Mapping[str, str | int],
        kind: SpanKind,
        links: Sequence[Link] = (),
        failed: str = "",
        **growth: Sequence[Moment],
    ) -> None:
        """Span that ends now, with one inside for each phase that took any time, and events of its growth."""
        name = "kvflow.load" if isinstance(record, LoadRecord) else "kvflow.lease"
        end_ns = time.time_ns()
        start_ns = end_ns - int(sum(record.seconds.values()) * _NS)
        parent = _PROPAGATOR.extract({"traceparent": record.traceparent} if record.traceparent else {}, Context())
        span = self._tracer.start_span(name, parent, kind, attributes, links, start_ns)
        for what, moments in growth.items():
            for seconds, tokens in moments:
                span.add_event(f"kvflow.{what}", {"kvflow.tokens": tokens}, start_ns + int(seconds * _NS))
        inside = trace.set_span_in_context(span, Context())
        for phase, taken in record.seconds.items():
            if taken > 0:
                part = self._tracer.start_span(f"{name}.{phase}", inside, start_time=start_ns)
                start_ns += int(taken * _NS)
                part.end(start_ns)
        if failed:
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end(end_ns)
