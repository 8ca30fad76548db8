"""Part: buffers for loads that cannot go directly into the cache, and the copies between buffers and cache."""
