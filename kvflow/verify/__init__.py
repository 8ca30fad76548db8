"""Optional part of a runtime: the reader compares digests of a load's blocks with the producer's digests."""
