"""Decisions about states, leases, the use of blocks, queues, failed peers, request rates and first contacts."""
