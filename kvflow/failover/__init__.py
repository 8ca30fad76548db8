"""Optional part of kvflow: loads of several tickets. If a source fails, the load goes on with the next ticket."""
