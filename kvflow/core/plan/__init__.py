"""Plans of reads: which ranks, which blocks, which pieces of a block, which descriptors."""
