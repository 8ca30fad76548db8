"""The KV cache of one rank: its layout, its memory and its groups of layers."""
