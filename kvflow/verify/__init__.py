"""Part: digests of blocks, which a reader compares with those of the producer."""
