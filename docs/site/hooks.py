"""What MkDocs adds to the pages: the API, a page a class; the repository's own pages; pictures by the palette."""

from __future__ import annotations

import enum
import os
import re
import sys
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
    "kvflow.Load": ("begin", "end", "follow", "note_progress", "progressed"),
    "kvflow.Runtime": ("observed_by",),
    "kvflow.prefix.SharedPrefixes": ("answer",),
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the API where the navigation says API."""
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
    return files


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

    markdown = _PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    if name == "reference/api.md":
        assert api_list() in markdown
        markdown = markdown.replace(api_list(), api_table())
    return _LINK.sub(link, markdown) if name in PAGES or not name.startswith("reference/api") else markdown
