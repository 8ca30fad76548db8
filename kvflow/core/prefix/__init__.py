"""Prefixes by name: their keys, the events that tell who has them, and a map of both. Pure."""
