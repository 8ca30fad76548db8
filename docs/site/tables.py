"""Tables of the docs that are made from the code, and kept in the pages so that they can be read in the repository.

    python docs/site/tables.py

writes them anew between `<!-- table: config -->` and `<!-- /table -->`; a test compares.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import kvflow

DOCS = Path(__file__).resolve().parents[1]
FIRST = ("Runtime", "Config", "ServeRequest", "Lease", "Ticket", "LoadRequest", "Load", "LoadReport", "CacheLayout")
HANDLES = ("Load", "Lease", "SharedPrefixes", "BlockWatch", "OfferWatch")
"""Made by the library: how is no part of the API."""
_MARK = re.compile(r"^<!-- table: (\w+) -->\n(?:.*?^<!-- /table -->\n)?", re.MULTILINE | re.DOTALL)


def public_names() -> dict[str, list[str]]:
    """Full names of what is public, by module; what one meets first comes first."""
    found = {}
    for module in kvflow.__public_modules__:
        names = [name for name in names_of(module) if name not in ("errors", "register")]
        names.sort(key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
        found[module] = [f"{module}.{name}" for name in names]
    return found


def names_of(module: str) -> list[str]:
    """The `__all__` of a module, which need not be one that can be imported here."""
    for node in ast.parse(_source_of(module).read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
    raise AssertionError(f"{module} has no __all__")


def find(full: str) -> Any:
    """What a full name stands for; None if it is of a module that cannot be imported here."""
    module, _, name = full.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def said_of(full: str) -> str:
    """The first paragraph of a public name's docstring, which of a value is the string below it."""
    module, _, name = full.rpartition(".")
    found = find(full)
    if inspect.isclass(found) or inspect.isfunction(found):
        return inspect.cleandoc(found.__doc__ or "").split("\n\n")[0]
    for path in sorted(_source_of(module).parent.glob("*.py")):
        body = ast.parse(path.read_text("utf-8")).body
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return (ast.get_docstring(node) or "").split("\n\n")[0]
        if said := _below_values(body).get(name):
            return said.split("\n\n")[0]
    return ""


def _source_of(module: str) -> Path:
    path = DOCS.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def api_list() -> str:
    """Public names by module."""
    rows = ((f"`{module}`", ", ".join(map(_short, names))) for module, names in public_names().items())
    return table(("module", "public names"), rows)


def api_table() -> str:
    """The same with the first sentence of each name's docstring, linked to its page: what the site has in its place."""

    def rows() -> Iterator[tuple[str, str]]:
        for module, names in public_names().items():
            yield f"**{module}**", ""
            yield from ((f"[{_short(full)}](api/{full}.md)", _first_sentence(said_of(full))) for full in names)

    return table(("name", "what it is"), rows())


def _short(full: str) -> str:
    return f"`{full.rpartition('.')[2]}`"


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", text, maxsplit=1)[0]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(header)
    lines = [names, *([_cell(cell) for cell in row] for row in rows)]
    first, *others = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([first, "|---" * len(names) + "|", *others])  # as tables that are written by hand


def _cell(text: str) -> str:
    """On one line, and without a bar that would end it: within code a bar ends nothing."""
    return re.sub(r"`[^`]*`|\|", lambda found: "\\|" if found[0] == "|" else found[0], " ".join(text.split()))


def settings_table(kind: type[Any]) -> str:
    """Fields of a dataclass with default and docstring; their type where the default does not show it."""
    said, hints = docstrings_of(kind), typing.get_type_hints(kind)

    def default(entry: Field[Any]) -> str:
        shown, hint = default_of(entry), hints[entry.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = [one for one in (typing.get_args(hint) if union else [hint]) if one is not types.NoneType]
        plain = " or ".join(re.sub(r"[\w.]+\.", "", inspect.formatannotation(one)) for one in kinds)
        if shown in ("required", "{}"):
            return f"{shown}, `{plain}`"
        return f"`None` or `{plain}`" if shown == "None" else f"`{shown}`"

    rows = ((f"`{entry.name}`", default(entry), said.get(entry.name, "")) for entry in fields(kind))
    return table(("setting", "default", "meaning"), rows)


def docstrings_of(kind: type[Any]) -> dict[str, str]:
    """The string below each field; a comment has none."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    return _below_values(body)


def _below_values(body: Iterable[ast.stmt]) -> dict[str, str]:
    found = {}
    for entry, text in pairwise(body):
        match entry, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(said))),
            ):
                found[name] = inspect.cleandoc(said)
    return found


def default_of(entry: Field[Any]) -> str:
    """A default as one would write it; sizes in bytes in the largest unit that divides them."""
    value = entry.default if entry.default_factory is MISSING else entry.default_factory()
    if value is MISSING:
        return "required"
    if isinstance(value, int) and not isinstance(value, bool) and value == 0:
        return "0"
    if is_dataclass(value):
        return f"{type(value).__name__}()"
    if isinstance(value, int) and "bytes" in entry.name:
        shift, unit = next((shift, unit) for shift, unit in _UNITS if value % (1 << shift) == 0)
        return f"{value >> shift} {unit}"
    return repr(value) if isinstance(value, str | bool | float | int | None) else str(value) or "{}"


_UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "bytes"))


def config_table() -> str:
    from kvflow import Config

    return settings_table(Config)


def limits_table() -> str:
    """The limits that users seldom meet, if they have a class of their own."""
    from kvflow import config

    kind = getattr(config, "Limits", None)
    return settings_table(kind) if kind is not None else "All limits are fields of `Config`, above."


def errors_table() -> str:
    """The first paragraph of an error's docstring says when it is raised, the second one what to do."""
    from kvflow import errors

    def rows(kind: type[errors.KVFlowError], depth: int = 0) -> Iterator[tuple[str, ...]]:
        again = "yes" if kind.retryable else "no"
        safe = "yes" if kind.memory_safe else "no"
        name = f"{'&nbsp;&nbsp;&nbsp;' * depth}`{kind.__name__}`"
        raised, _, advice = (inspect.getdoc(kind) or "").partition("\n\n")
        yield name, str(kind.blame), again, safe, raised, advice
        for below in kind.__subclasses__():
            if below.__module__ == errors.__name__:
                yield from rows(below, depth + 1)

    header = ("error", "`blame`", "`retryable`", "`memory_safe`", "raised when", "what to do")
    return table(header, rows(errors.KVFlowError))


def shapes_table() -> str:
    """What `CacheLayout.infer` takes, style by style."""
    from kvflow import KVStyle
    from kvflow.core.cache import layout

    letters = {"block": "B", "kv": "2", "token": "N", "head": "H", "dim": "D"}

    def shape(outer: Iterable[str], inner: Iterable[str]) -> str:
        return f"`({', '.join(letters[axis] for axis in (*outer, *inner))})`"

    rows = []
    for style in KVStyle:
        outer, latent = layout._OUTER_AXES[style], style is KVStyle.MLA
        inner = [layout._MLA_INNER_AXES] * 2 if latent else [layout._INNER_AXES[order] for order in ("NHD", "HND")]
        number = "a pair (K, V) of tensors" if style is KVStyle.APART else "one tensor"
        rows.append((f"`{style}`", number, *(shape(outer, axes) for axes in inner), ", ".join(layout._PARTS[style])))
    return table(("style", "a layer is", 'shape, order "NHD"', 'shape, order "HND"', "regions"), rows)


def backends_table() -> str:
    """Return what `layout_for_backend` knows by name; entries that differ only in name and versions share a row."""
    from kvflow.attention_backends import BACKEND_LAYOUTS, BackendLayout

    def shape(row: BackendLayout) -> tuple[str, ...]:
        formats = ", ".join(dict.fromkeys((*row.kv_formats, *row.byte_formats)))
        return f"`{row.style}`", row.order, ", ".join(row.memory_orders), formats, row.view

    def versions(row: BackendLayout) -> str:
        return re.sub(r"\b([\d.]+)-\1$", r"\1", row.versions.replace(" and later", "+").replace(" to ", "-"))

    shapes = list(dict.fromkeys(map(shape, BACKEND_LAYOUTS)))
    rows = []
    for one in shapes:
        alike = [row for row in BACKEND_LAYOUTS if shape(row) == one]
        names = []
        for version in dict.fromkeys(map(versions, alike)):
            backends = ", ".join(f"`{row.backend}`" for row in alike if versions(row) == version)
            names.append(f"{backends} ({version})")
        rows.append(("; ".join(names), *one))
    return table(("backend (read from)", "style", "axes", "strides", "`kv_format`", "first"), rows)


_RUNS = re.compile(r"^(Task|Thread) `(kvflow-[^`]+)`: (.+)", re.DOTALL)


def runs_in(package: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Tasks and threads: (kind, name) and where each is, and what is said of it in the docstring of its body."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    if said := _RUNS.match(" ".join(paragraph.split())):
                        place = path.relative_to(package).as_posix()
                        found[said[1], said[2]] = (place, said[3])
    return found


def runs_table() -> str:
    found = sorted(runs_in(DOCS.parent / "kvflow").items())
    rows = [(f"{kind.lower()} `{name}`", f"`{place}`", said) for (kind, name), (place, said) in found]
    return table(("name", "body in", "begins and ends"), rows)


def cache_dtypes_table() -> str:
    from kvflow.vllm.cache_dtypes import CACHE_DTYPES

    def moved(row: Any) -> str:
        of = f" of {row.values}" if row.values else ""
        return f"values{of}" if row.kv_format == "plain" else "whole blocks" if row.kv_format else ""

    rows = ((f"`{row.name}`", f"{row.since}+", row.state, moved(row)) for row in CACHE_DTYPES.values())
    return table(("`--kv-cache-dtype`", "vLLM", "", "what is moved"), rows)


def vllm_versions_table() -> str:
    changes = runpy.run_path(str(DOCS / "site" / "vllm_versions.py"))["CHANGES"]
    return table(("vLLM", "brings", "before"), ((f"{row.since}+", row.brings, row.before) for row in changes))


def figures_tables() -> dict[str, Callable[[], str]]:
    """Return the tables of measured numbers."""
    made = runpy.run_path(str(DOCS / "site" / "figures.py"))["FIGURES"]
    return {name: (lambda make=make: table(*make())) for name, make in made.items()}


TABLES: dict[str, Callable[[], str]] = {
    "api": api_list,
    "config": config_table,
    "limits": limits_table,
    "errors": errors_table,
    "shapes": shapes_table,
    "backends": backends_table,
    "cache_dtypes": cache_dtypes_table,
    "runs": runs_table,
    "vllm_versions": vllm_versions_table,
    **figures_tables(),
}


def pages() -> dict[Path, str]:
    """Every page that has tables, as it has to be."""
    found = {}
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text("utf-8")
        made = _MARK.sub(lambda mark: f"<!-- table: {mark[1]} -->\n\n{TABLES[mark[1]]()}\n\n<!-- /table -->\n", text)
        if _MARK.search(text):
            found[path] = made
    return found


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, "utf-8")
