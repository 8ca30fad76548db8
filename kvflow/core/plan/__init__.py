"""Plans of reads: which ranks, which blocks, which bytes of a block, and the descriptors that read them."""
