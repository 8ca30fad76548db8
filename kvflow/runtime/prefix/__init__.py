"""Prefixes from whoever has them: a cache that is shared, and pulls from those of others."""
