"""The NIXL transport: its part on the event loop, the NIXL agents on their own thread, and NIXL's Python bindings."""
