"""The protocol between engines: messages, tickets, seals, clocks."""
