"""`python -m ray_server`, with examples/ on the path; --help says more."""

import sys

from ray_server.command import main

if __name__ == "__main__":
    sys.exit(main())
