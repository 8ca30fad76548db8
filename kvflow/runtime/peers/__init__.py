"""Remote engines: handshakes with their ranks, connections to these ranks, and the resolution of tickets to ranks."""
