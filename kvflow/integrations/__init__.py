"""kvflow in other people's programs: engines, metrics and traces. Each module needs what its name says, as an extra."""
