"""The device that a cache is on: the CPU, or one with streams and memory of its own."""
