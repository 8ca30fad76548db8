"""Part: leases of prompts that are still being computed, and pending tickets, with an offer that is still to come."""
