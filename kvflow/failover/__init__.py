"""Optional part of a runtime: loads with several tickets.

If a producer fails, the load continues with the next ticket.
"""
