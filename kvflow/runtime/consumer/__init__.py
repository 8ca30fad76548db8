"""The consumer's side: loads, their bytes, their leases."""
