"""OpenTelemetry spans of loads and leases, joined by the trace context in the ticket. Needs `kvflow[tracing]`.

    lease = runtime.serve_blocks(ServeRequest(..., traceparent=current_traceparent()))       # producer
    async with kvflow.Runtime(config, observers=[OpenTelemetrySpans()]) as runtime: ...      # both sides

The producer's "kvflow.lease" span and the consumer's "kvflow.load" span are children of the span named in the ticket,
so both engines appear in one trace. A span is created from the record of an ended load or lease, with start and end
times in the past. A load span also links to the span that was current where the load was awaited.
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
_NS_PER_S = 1_000_000_000


def current_traceparent() -> str:
    """Return the current span as a W3C traceparent, for `ServeRequest.traceparent`.

    Returns:
        The traceparent of the current span or, if there is none, of a new sampled trace.
    """
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    if "traceparent" in carrier:
        return carrier["traceparent"]
    made = RandomIdGenerator()
    return f"00-{made.generate_trace_id():032x}-{made.generate_span_id():016x}-01"


def _attributes(record: LoadRecord | LeaseRecord, *names: str) -> dict[str, str | int]:
    """Return the span attributes of `record`: engine id, ranks, request id, outcome, number of blocks.

    The fields `names` of the record are added.
    """
    return {
        "kvflow.engine": record.engine_id,
        **{f"kvflow.{name}_rank": number for name, number in record.rank._asdict().items()},
        **{f"kvflow.{name}": getattr(record, name) for name in ("request_id", "outcome", "blocks", *names)},
    }


class OpenTelemetrySpans:
    """A `kvflow.Observer` that creates an OpenTelemetry span for each ended load and lease.

    Args:
        tracer: Creates the spans; None: a tracer of the global provider.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("kvflow")

    def load_ended(self, record: LoadRecord) -> None:
        """Create the span of an ended load, with a child span for each phase.

        Args:
            record: Record of the load.
        """
        current = trace.get_current_span().get_span_context()
        attributes = _attributes(record, "peer", "bytes", "descriptors", "verification", "freshness")
        attributes["kvflow.peer_engine"] = record.peer_engine_id
        error = record.error or (record.outcome if record.outcome == CANCELLED else "")
        span_links = [Link(current)] if current.is_valid else []
        self._make_span(record, attributes, SpanKind.CLIENT, span_links, error, landed=record.landed)

    def lease_ended(self, record: LeaseRecord) -> None:
        """Create the span of an ended lease, with a child span for each phase.

        Args:
            record: Record of the lease.
        """
        self._make_span(record, _attributes(record, "tokens", "readers"), SpanKind.SERVER, computed=record.computed)

    def _make_span(
        self,
        record: LoadRecord | LeaseRecord,
        attributes: Mapping[str, str | int],
        kind: SpanKind,
        links: Sequence[Link] = (),
        error: str = "",
        **growth: Sequence[Moment],
    ) -> None:
        """Create a span that ends now, with a child span for each phase of the record that took time.

        `error`: the span's error text, or "". `growth`: one keyword argument, either `landed` or `computed`, with a
        list of moments (seconds and number of tokens). Each moment becomes an event on the span, "kvflow.landed" or
        "kvflow.computed".
        """
        name = "kvflow.load" if isinstance(record, LoadRecord) else "kvflow.lease"
        end_ns = time.time_ns()
        start_ns = end_ns - int(sum(record.seconds.values()) * _NS_PER_S)
        parent = _PROPAGATOR.extract({"traceparent": record.traceparent} if record.traceparent else {}, Context())
        span = self._tracer.start_span(name, parent, kind, attributes, links, start_ns)
        for what, moments in growth.items():
            for seconds, tokens in moments:
                span.add_event(f"kvflow.{what}", {"kvflow.tokens": tokens}, start_ns + int(seconds * _NS_PER_S))
        inside = trace.set_span_in_context(span, Context())
        for phase, taken in record.seconds.items():
            if taken > 0:
                part = self._tracer.start_span(f"{name}.{phase}", inside, start_time=start_ns)
                start_ns += int(taken * _NS_PER_S)
                part.end(start_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_ns)
