"""Engines that use kvflow: what any connector needs, and the connectors, each imported when it is asked for."""
