"""Observers that export loads and leases: Prometheus metrics, OpenTelemetry spans, and timelines from record files."""
