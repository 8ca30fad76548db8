"""The KV cache of one rank: the layout of its tensors, its memory and its groups of layers."""
