"""What is decided about states, leases, blocks, queues, failures and first contacts."""
