"""NIXL: as the loop sees it, as its own thread sees it, and the way between."""
