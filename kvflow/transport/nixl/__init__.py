"""NIXL: the transport on the loop, its agents on their thread, and the way between."""
