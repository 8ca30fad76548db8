"""Devices on which caches lie: the CPU, or an accelerator with its own streams and memory."""
