"""kvflow in other people's programs: engines, metrics, traces. Each module needs what its name says, when imported."""
