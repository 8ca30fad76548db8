"""Remote engines: handshakes with their ranks, connections to these ranks, and the way from a ticket to its ranks."""
