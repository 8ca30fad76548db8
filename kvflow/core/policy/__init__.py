"""Decisions about states, leases, blocks, queues, failures and first contacts."""
