"""Remote engines: handshakes with their ranks, connections to them, and the way from a ticket to both."""
