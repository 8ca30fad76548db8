"""How bytes get where they belong: routes, scratch memory, host buffers, copies."""
