"""Plans of reads: ranks, blocks, pieces, descriptors."""
