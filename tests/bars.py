"""`python3 dev.py bars`: the size of the code in this checkout, or in the checkouts that are named."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.source_trees import parsed

OF_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
CORE_RING: tuple[str, ...] = (
    *("", "checks", "config", "core", "errors", "extras", "forks", "hosts", "limits", "logs"),
    *("parts", "runtime", "secret_ids", "threads", "transport"),
)
"""The innermost ring, "" being `kvflow` itself (docs/architecture.md#packages)."""


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    text = path.read_text("utf-8")
    told = {
        line
        for node in ast.walk(parsed(path))
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
    core = [path for path in files if _part_of(path.relative_to(package)) in CORE_RING]
    loaded = loaded_by_import(package)
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
        "public members of Runtime": str(len(public_members(package / "runtime" / "runtime.py", "Runtime"))),
        "names in kvflow.__all__": str(len(public_names(package / "__init__.py"))),
    }


def lines_of(paths: Iterable[Path]) -> str:
    return f"{sum(map(code_lines, paths)):,}"


def _part_of(path: Path) -> str:
    name = path.parts[0].removesuffix(".py")
    return "" if name == "__init__" else name


def loaded_by_import(package: Path, module: str = "__init__.py") -> list[Path]:
    """Return the files that `import kvflow`, or a module of it, loads, by the imports at the top of files."""
    found, rest = dict[Path, None](), [package / "__init__.py", package / module]
    while rest:
        path = rest.pop()
        if path not in found:
            found[path] = None
            rest += _imported_at_once(package, path)
    return list(found)


def _imported_at_once(package: Path, path: Path) -> Iterator[Path]:
    """Yield the files that loading a file imports, with their packages. Imports within functions do not count."""
    for node in parsed(path).body:
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                names = [module, *(f"{module}.{alias.name}" for alias in aliases)]
            case _:
                continue
        for pieces in (name.split(".") for name in names if name.split(".")[0] == package.name):
            for end in range(1, len(pieces) + 1):
                place = package.joinpath(*pieces[1:end])
                yield from (file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file())


def public_members(path: Path, owner: str) -> list[str]:
    (found,) = (node for node in parsed(path).body if isinstance(node, ast.ClassDef) and node.name == owner)
    functions = [node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function.name for function in functions if not function.name.startswith("_")]


def public_names(path: Path) -> list[str]:
    values = [node.value for node in parsed(path).body if isinstance(node, ast.Assign)]
    targets = [ast.unparse(node.targets[0]) for node in parsed(path).body if isinstance(node, ast.Assign)]
    return [str(name) for name in ast.literal_eval(dict(zip(targets, values, strict=True))["__all__"])]


def main(arguments: list[str]) -> None:
    roots = [Path(argument).resolve() for argument in arguments] or [Path(__file__).resolve().parents[1]]
    columns = [bars(root) for root in roots]
    print("| |", " | ".join(root.name for root in roots), "|")
    print("|---" * (len(roots) + 1) + "|")
    for measure in columns[0]:
        print(f"| {measure} |", " | ".join(column[measure] for column in columns), "|")


if __name__ == "__main__":
    main(sys.argv[1:])
