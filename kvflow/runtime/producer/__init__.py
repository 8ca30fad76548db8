"""The producer's side: leases, answers, farewells."""
