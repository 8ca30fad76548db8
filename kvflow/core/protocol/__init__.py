"""What engines say to each other: messages, tickets, seals, clocks."""
