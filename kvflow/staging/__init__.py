"""Optional part of kvflow: buffers for loads that cannot go directly into the cache, and the copies to the cache."""
