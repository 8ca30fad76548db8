"""The cache of one engine: its layout, its memory, its groups."""
