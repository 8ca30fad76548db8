"""Decisions about states, leases, the use of blocks, queues, failures of peers, rates and first contacts."""
