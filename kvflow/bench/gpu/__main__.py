"""The experiments as a program."""

import sys

from kvflow.bench.gpu.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
