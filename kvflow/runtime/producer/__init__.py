"""The producer's side: leases, farewells."""
