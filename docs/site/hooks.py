"""What MkDocs fills in: tables made from the source, the public names, and the repository's own pages.

A page says `<!-- table: config -->` or `<!-- api: kvflow -->` where one is to stand. Nothing made here is kept in the
repository, so nothing can be out of date.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# Pages of the repository that are pages of the site, too.
PAGES = {
    "contributing.md": ".github/CONTRIBUTING.md",
    "examples.md": "examples/README.md",
}
_ON_SITE = {path: name for name, path in PAGES.items()}
_MARK = re.compile(r"^<!-- (table|api): ([\w.]+) -->$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]\n]+)\]\((?!\w+://|#)([^)#\n]+)([^)\n]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's own pages."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put what a mark asks for in its place; links between the repository and the site lead to the site's pages."""
    name = page.file.src_uri
    there = ROOT / PAGES.get(name, f"docs/{name}")

    def link(match: re.Match[str]) -> str:
        target = (there.parent / match[2]).resolve()
        if target.is_relative_to(DOCS):
            found = target.relative_to(DOCS).as_posix()
        else:
            found = _ON_SITE.get(target.relative_to(ROOT).as_posix(), "")
        if not found or target.is_dir():
            return match[1]  # it is in the repository only
        return f"[{match[1]}]({os.path.relpath(found, Path(name).parent)}{match[3]})"

    return _MARK.sub(lambda match: _MADE[match[1]](match[2]), _LINK.sub(link, markdown))


def _table_named(name: str) -> str:
    return TABLES[name]()


def _api(module: str) -> str:
    """Every public name of a module, one after the other."""
    names = importlib.import_module(module).__all__
    return "\n\n".join(f"::: {module}.{name}" for name in names if name != "errors")


# --- tables


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header)]
    lines += [["---"] * len(lines[0]), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """On one line, and without a bar that would end it: within code a bar ends nothing."""
    return re.sub(r"`[^`]*`|\|", lambda found: "\\|" if found[0] == "|" else found[0], " ".join(text.split()))


def settings_table(kind: type[Any]) -> str:
    """Fields of a dataclass with type, default and docstring."""
    said = docstrings_of(kind)
    rows = (
        (f"`{entry.name}`", f"`{entry.type}`", f"`{default_of(entry)}`", said.get(entry.name, ""))
        for entry in fields(kind)
    )
    return table(("setting", "type", "default", "meaning"), rows)


def docstrings_of(kind: type[Any]) -> dict[str, str]:
    """The string below each field; a comment has none."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    found = {}
    for entry, text in pairwise(body):
        match entry, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                found[name] = inspect.cleandoc(said)
    return found


def default_of(entry: Field[Any]) -> str:
    """A default as one would write it; sizes in bytes in the largest unit that divides them."""
    value = entry.default if entry.default_factory is MISSING else entry.default_factory()
    if value is MISSING:
        return "required"
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
    from kvflow import errors

    def rows(kind: type[errors.KVFlowError], depth: int = 0) -> Iterator[tuple[str, ...]]:
        again = "yes" if kind.retryable else "no"
        safe = "yes" if kind.memory_safe else "ask `quarantine`"
        name = f"{'&nbsp;&nbsp;&nbsp;' * depth}[`{kind.__name__}`](#kvflow.errors.{kind.__name__})"
        yield name, str(kind.blame), again, safe, inspect.getdoc(kind) or ""
        for below in kind.__subclasses__():
            if below.__module__ == errors.__name__:
                yield from rows(below, depth + 1)

    return table(("error", "`blame`", "`retryable`", "`memory_safe`", "raised when"), rows(errors.KVFlowError))


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
    """What `layout_for_backend` knows by name."""
    from kvflow.core.cache.backends import BACKEND_LAYOUTS

    rows = (
        (
            f"`{row.backend}`",
            row.versions,
            f"`{row.style}`",
            row.order,
            ", ".join(row.memory_orders),
            ", ".join(dict.fromkeys((*row.kv_formats, *row.byte_formats))),
            row.view,
        )
        for row in BACKEND_LAYOUTS
    )
    return table(("backend", "read from", "style", "axes", "strides", "`kv_format`", "first"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "config": config_table,
    "limits": limits_table,
    "errors": errors_table,
    "shapes": shapes_table,
    "backends": backends_table,
}
_MADE: dict[str, Callable[[str], str]] = {"table": _table_named, "api": _api}
