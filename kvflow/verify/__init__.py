"""Optional part of kvflow: digests of a load's blocks, which the reader compares with the producer's digests."""
