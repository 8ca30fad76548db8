"""Optional part of kvflow: growing leases, of prompts that are still being computed, and pending tickets."""
