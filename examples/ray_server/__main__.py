"""Run as `python examples/ray_server` or `python -m examples.ray_server`; --help lists the options."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_server.command import main

if __name__ == "__main__":
    sys.exit(main())
