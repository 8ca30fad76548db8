"""Pages that MkDocs adds: the API, a page for each class; types in its signatures; the repository's own pages."""

from __future__ import annotations

import ast
import enum
import functools
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(Path(__file__).parent))

from tables import HANDLES, api_list, api_table, find, public_names  # noqa: E402

# Pages of the repository that are pages of the site, too.
PAGES = {
    "contributing.md": ".github/CONTRIBUTING.md",
    "style.md": ".github/STYLE.md",
    "releasing.md": ".github/RELEASING.md",
    "examples.md": "examples/README.md",
}
_ON_SITE = {path: name for name, path in PAGES.items()}
_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((?!\w+://|#)([^)#\n]+)([^)\n]*)\)")
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]+)" src="([^"]+)">\s*</picture>'
)

# What the runtime, and nobody else, calls on what users hold.
_OWN = {
    "kvflow.Load": (
        *("cancel_overdue", "current_phase", "end_phases", "enter_phase", "failure", "follow", "note_progress"),
        *("progressed", "report", "set_outcome", "start_task", "take_back_cancel"),
    ),
    "kvflow.prefix.SharedPrefixes": ("answer",),
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the version into the header, and the pages of the API where the navigation says API."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    config.site_name = f"{project['name']} {project['version']}"
    reference = next(part["Reference"] for part in config.nav if "Reference" in part)
    entry = next(part for part in reference if "API" in part)
    entry["API"] = ["reference/api.md"]
    for module, names in public_names().items():
        pages = [{full.removeprefix(f"{module}."): _page_of(full)} for full in names]
        entry["API"].append({module: pages})
    return config


def _page_of(full: str) -> str:
    """Where a name's page is; the name as it is written, for others have one that differs in case alone."""
    return f"reference/api/{full}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's own pages, and a page for each public name."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text("utf-8")))
    files.append(File.generated(config, "site.css", content=(DOCS / "site" / "site.css").read_text("utf-8")))
    for names in public_names().values():
        for full in names:
            files.append(File.generated(config, _page_of(full), content=_api_page(full)))
    types = [f"::: {full}\n    options: {{ heading_level: 2, show_root_full_path: true }}\n" for full in aliases()]
    files.append(File.generated(config, "reference/types.md", content="\n".join(["# Types in signatures\n", *types])))
    return files


def aliases() -> list[str]:
    """Return the full names of type aliases in annotations of public classes and functions, which then link to them."""
    found = set()
    for kind in filter(None, map(find, (full for names in public_names().values() for full in names))):
        module = getattr(kind, "__module__", "")
        body = _body_of(module) if module.startswith("kvflow") else []
        (node,) = [one for one in body if getattr(one, "name", None) == getattr(kind, "__name__", "")] or [None]
        for part in ast.walk(node) if node else ():
            for annotation in (getattr(part, "annotation", None), getattr(part, "returns", None)):
                for name in ast.walk(annotation) if annotation else ():
                    if isinstance(name, ast.Name) and (full := _alias(module, name.id)):
                        found.add(full)
    return sorted(found, key=lambda full: (full.rpartition(".")[2], full))


def _alias(module: str, name: str) -> str:
    """Return the full name of a type alias as a module knows it; "" if the name is no alias."""
    for node in _body_of(module):
        match node:
            case ast.AnnAssign(target=ast.Name(id=target), annotation=ast.Name(id="TypeAlias")) if target == name:
                return f"{module}.{name}"
            case ast.ImportFrom(module=str(source)) if source.startswith("kvflow") and name in [
                one.name for one in node.names
            ]:
                return _alias(source, name)
    return ""


@functools.cache
def _body_of(module: str) -> list[ast.stmt]:
    return ast.parse(Path(sys.modules[module].__file__ or "").read_text("utf-8")).body


def _api_page(full: str) -> str:
    found = find(full)
    name = full.rpartition(".")[2]
    hidden = [f"!^{own}$" for own in _OWN.get(full, ())]
    options: dict[str, Any] = {"heading_level": 1, "filters": ["!^_", "^__init__$", *hidden]}
    if isinstance(found, type) and issubclass(found, enum.Enum):
        options["show_if_no_docstring"] = True  # its members
    if name in HANDLES:
        options |= {"merge_init_into_class": False, "filters": ["!^_", *hidden]}
    shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in options.items()}
    lines = [f"      {key}: {value}" for key, value in shown.items()]
    return "\n".join([f"::: {full}", "    options:", *lines, ""])


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links between the repository and the site lead to the site's pages; a picture is the palette's."""
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

    if name.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.1}  # users look for the guides
    markdown = _PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    if name == "reference/api.md":
        assert api_list() in markdown
        markdown = markdown.replace(api_list(), api_table())
    return _LINK.sub(link, markdown) if name in PAGES or not name.startswith("reference/api") else markdown
