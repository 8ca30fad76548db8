"""The process of one experiment: `python -m kvflow.bench.gpu.one module:function DEVICE LIMIT_S FACTS_FILE`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvflow.bench.gpu.facts import Facts
from kvflow.bench.gpu.setting import Setting


def main(arguments: Sequence[str]) -> None:
    """Run the function; what it raises ends the process, with its traceback on stderr."""
    name, device, limit_s, facts = arguments
    function(name)(Setting(device=device, limit_s=float(limit_s), facts=Facts(Path(facts))))


def function(name: str) -> Callable[[Setting], None]:
    """What `module:function` names."""
    module, _, attribute = name.partition(":")
    found: Callable[[Setting], None] = getattr(importlib.import_module(module), attribute)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
