"""The protocol between engines: messages and their codec, tickets, leases of ranks, digests of prompts, seals."""
