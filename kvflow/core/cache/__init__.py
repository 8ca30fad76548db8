"""One engine's cache: its layout, its memory, what it is made of."""
