"""The way of bytes to where they belong: routes, scratch memory, host buffers, copies."""
