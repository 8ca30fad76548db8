"""Optional part of a runtime: pending tickets, and growing leases (leases on prompts that are still being computed)."""
