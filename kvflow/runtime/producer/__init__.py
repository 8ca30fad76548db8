"""The producer's side: leases and their blocks, answers to readers, goodbyes."""
