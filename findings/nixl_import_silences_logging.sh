#!/usr/bin/env bash
# Version:  nixl-cu12 1.5.1, Python 3.11 (any).
# Expected: importing a library leaves the standard library's logging as it was: a log call with wrong arguments, or a
#           handler that fails, reports its traceback on stderr.
# Seen:     `import nixl_cu12` (so `import nixl`, too) sets `logging.raiseExceptions = False` for the whole process:
#           from then on nobody's lost log lines are reported, unless NIXL_DEBUG_LOGGING is set:
#           "before: True, 'Logging error' reported; after: False, nothing reported"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps nixl-cu12==1.5.1 numpy==2.3.5
unset NIXL_DEBUG_LOGGING
"$folder/venv/bin/python" - <<'PYTHON'
import contextlib
import io
import logging
import sys

logging.basicConfig(stream=io.StringIO())


def reported():
    with contextlib.redirect_stderr(io.StringIO()) as written:
        logging.getLogger("an.application").warning("%d tokens", "many")
    return "Logging error" in written.getvalue()


before = logging.raiseExceptions, reported()
import nixl_cu12

after = logging.raiseExceptions, reported()
said = {True: "'Logging error' reported", False: "nothing reported"}
print(f"before: {before[0]}, {said[before[1]]}; after: {after[0]}, {said[after[1]]}")
sys.exit((before, after) != ((True, True), (False, False)))
PYTHON
