"""Part: loads of several tickets, which go on with the next one if a source fails."""
