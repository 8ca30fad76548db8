"""`python3 dev.py bars`: how large the house is, for this checkout or for those that are named."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

OF_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_CORE = ("checks", "config", "core", "device", "errors", "extras", "hosts", "limits", "logs", "runtime", "transport")
CORE_RING = {"__init__", *_CORE}

LOADED = """
import sys, kvflow
print(*sorted({m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "kvflow" and m.__file__}), sep="\\n")
"""
PUBLIC = """
import kvflow
print(sum(not name.startswith("_") for name in vars(kvflow.Runtime)), len(kvflow.__all__))
"""


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    text = path.read_text("utf-8")
    told = {
        line
        for node in ast.walk(ast.parse(text))
        for statement in _statements(node)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement.value.value, str)
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in OF_NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - told)


def _statements(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)
    return body if isinstance(body, list) else []


def bars(root: Path) -> dict[str, str]:
    """Each measure and its number."""
    package = root / "kvflow"
    files = sorted(package.rglob("*.py"))
    core = [path for path in files if path.relative_to(package).parts[0].removesuffix(".py") in CORE_RING]
    loaded = [Path(name) for name in printed(root, LOADED).split()]
    members, names = printed(root, PUBLIC).split()
    classes = [node for path in files for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
    tagged = [node for node in classes if any(keyword.arg == "tag" for keyword in node.keywords)]
    return {
        "files that `import kvflow` loads": str(len(loaded)),
        "their code lines": lines_of(loaded),
        "the core ring, code lines": lines_of(core),
        "package, code lines": lines_of(files),
        "package, files": str(len(files)),
        "classes": str(len(classes)),
        "tagged messages": str(len(tagged)),
        "public members of Runtime": members,
        "names in kvflow.__all__": names,
    }


def lines_of(paths: Iterable[Path]) -> str:
    return f"{sum(map(code_lines, paths)):,}"


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def printed(root: Path, code: str) -> str:
    """What Python prints that runs the code on the checkout."""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout


def main(arguments: list[str]) -> None:
    roots = [Path(argument).resolve() for argument in arguments] or [Path(__file__).resolve().parents[1]]
    columns = [bars(root) for root in roots]
    print("| |", " | ".join(root.name for root in roots), "|")
    print("|---" * (len(roots) + 1) + "|")
    for measure in columns[0]:
        print(f"| {measure} |", " | ".join(column[measure] for column in columns), "|")


if __name__ == "__main__":
    main(sys.argv[1:])
