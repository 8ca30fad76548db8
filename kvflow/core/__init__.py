"""Decisions without waiting: layouts, plans, messages, state tables. Pure: no I/O, no clock, no torch."""
