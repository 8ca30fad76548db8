"""Spans of both engines in one trace."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests_support import in_virtual_time

from kvflow.observe.opentelemetry import OpenTelemetrySpans, current_traceparent
from tests.observe.observed import TRACEPARENT, grown, observed


def provider() -> tuple[TracerProvider, InMemorySpanExporter]:
    made, exporter = TracerProvider(), InMemorySpanExporter()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made, exporter


async def test_load_and_lease_are_children_of_the_tickets_span_and_a_failed_load_is_an_error() -> None:
    traces, exporter = provider()
    tracer = traces.get_tracer("test")
    with tracer.start_as_current_span("decode") as here:
        async with observed([OpenTelemetrySpans(tracer)]):
            pass
    spans = exporter.get_finished_spans()
    good = {span.name: span for span in spans if (span.attributes or {}).get("kvflow.request_id") == "good"}
    _, trace_id, span_id, _ = TRACEPARENT.split("-")
    for name in ("kvflow.load", "kvflow.lease"):
        assert f"{good[name].context.trace_id:032x}" == trace_id
        assert good[name].parent is not None
        assert f"{good[name].parent.span_id:016x}" == span_id
        whose = {key: value for key, value in (good[name].attributes or {}).items() if key.endswith("rank")}
        assert whose == {"kvflow.dp_rank": 0, "kvflow.pp_rank": 0, "kvflow.tp_rank": 0}
    load = good["kvflow.load"]
    assert [link.context.span_id for link in load.links] == [here.get_span_context().span_id]
    phases = [span for span in spans if span.parent is not None and span.parent.span_id == load.context.span_id]
    assert "kvflow.load.wire" in [span.name for span in phases]
    assert all(load.start_time <= span.start_time <= span.end_time <= load.end_time + 1000 for span in phases)
    assert load.status.status_code is StatusCode.UNSET
    (failed,) = [span for span in spans if span.status.status_code is StatusCode.ERROR]
    assert failed.name == "kvflow.load"
    assert "the lease has ended" in (failed.status.description or "")


@in_virtual_time
async def test_what_flows_has_an_event_for_each_moment() -> None:
    traces, exporter = provider()
    await grown([OpenTelemetrySpans(traces.get_tracer("test"))])
    spans = {span.name: span for span in exporter.get_finished_spans()}
    counts = {}
    for name, what in (("lease", "computed"), ("load", "landed")):
        span = spans[f"kvflow.{name}"]
        counts[what] = [(event.attributes or {})["kvflow.tokens"] for event in span.events]
        assert {event.name for event in span.events} == {f"kvflow.{what}"}
        times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
        assert times == sorted(times)
    assert counts["computed"] == [4, 8, 14, 15]
    assert counts["landed"][-1] == 15


def test_the_current_span_is_what_a_ticket_should_carry() -> None:
    traces, _ = provider()
    with traces.get_tracer("test").start_as_current_span("prefill") as span:
        here = span.get_span_context()
        assert current_traceparent() == f"00-{here.trace_id:032x}-{here.span_id:016x}-{here.trace_flags:02x}"
    first, second = current_traceparent(), current_traceparent()
    assert first != second
    assert len(first) == len(TRACEPARENT)
