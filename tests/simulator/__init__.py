"""A deterministic simulator of several engines: a seed determines a whole run."""

from tests.simulator.simulation import Result, Violation, describe, simulate

__all__ = ["Result", "Violation", "describe", "simulate"]
