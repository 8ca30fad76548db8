"""Devices that caches are on: the CPU, or an accelerator with its own streams and memory."""
