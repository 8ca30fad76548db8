"""Part: memory that bytes go through where the cache cannot be read into directly, and the copies between both."""
