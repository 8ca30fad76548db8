"""Remote engines: who they are, how they are reached."""
