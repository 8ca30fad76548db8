"""Hypothesis on a machine that does other things too: an example may be slow without being wrong."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("kvflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvflow")
