"""A process with the NIXL_PLUGIN_DIR of another install: here a folder without plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def lines_of_another_install(folder: Path, text: str) -> list[str]:
    """Return the lines that a script prints there. Each names both folders: the variable's, and that of NIXL's own."""
    script, plugins = folder / "script.py", folder / "plugins"
    script.write_text(text)
    plugins.mkdir()
    environment = {**os.environ, "NIXL_PLUGIN_DIR": str(plugins)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    for line in lines:
        assert f"; NIXL_PLUGIN_DIR is set to {str(plugins)!r}, this NIXL's own plugins are in '/" in line
    return lines
