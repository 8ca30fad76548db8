"""A deterministic simulator of several engines: one seed is one run, the same every time."""

from tests.simulator.simulation import Result, Violation, describe, simulate

__all__ = ["Result", "Violation", "describe", "simulate"]
