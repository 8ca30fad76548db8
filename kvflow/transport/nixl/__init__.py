"""The NIXL transport: its side on the event loop, its agents on their own thread, and NIXL's bindings."""
