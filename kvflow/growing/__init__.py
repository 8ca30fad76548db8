"""Optional part of kvflow: leases of prompts that are still being computed, and tickets from before their lease."""
