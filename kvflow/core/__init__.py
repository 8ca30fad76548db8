"""The core: layouts, plans, messages and state tables. It decides and never waits: no I/O, no clock, no torch."""
