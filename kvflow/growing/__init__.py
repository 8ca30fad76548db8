"""Part: leases that grow while their prompt is computed, and tickets whose offer is still to come."""
