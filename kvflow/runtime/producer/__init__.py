"""The producer's side: leases and their blocks, answers to readers' questions, and goodbyes when the rank closes."""
