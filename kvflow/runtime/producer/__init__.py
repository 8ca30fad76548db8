"""The producer's side: leases and their blocks, answers to readers' questions, and goodbyes when this rank closes."""
