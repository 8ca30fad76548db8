"""Run as `python examples/openai_server` or `python -m examples.openai_server`; --help lists the commands."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openai_server.command import main

if __name__ == "__main__":
    sys.exit(main())
