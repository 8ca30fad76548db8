"""Optional part of a runtime: loads through buffers, for blocks that cannot be read directly into the cache."""
