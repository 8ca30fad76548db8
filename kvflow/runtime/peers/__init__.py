"""Remote engines: handshakes with their ranks, connections to them, and the ranks and leases of a ticket."""
