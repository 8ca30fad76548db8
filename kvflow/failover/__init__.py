"""Optional part of kvflow: loads with several tickets. If a producer fails, the load goes on with the next ticket."""
