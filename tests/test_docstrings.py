"""What is public says what it takes, what it gives back and what it raises: Args, Returns and Raises in its docstring.

Looked at is the source, so that it makes no difference what is installed here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import kvflow
from tests.support.source_trees import parsed

ROOT = Path(__file__).parent.parent
TABLES = runpy.run_path(str(ROOT / "docs/site/tables.py"))
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Definition: TypeAlias = Function | ast.ClassDef

NOT_OURS = {"kvflow.vllm.KVFlowConnector": "vLLM calls it, and vLLM's base class says what each method takes"}
NOT_SAID_TWICE = ("Only for", "Blocking form of `kvflow.")
"""First words of docstrings that refer to another. `tests/test_blocking.py` compares the arguments."""
_SECTION = re.compile(r"^(Args|Returns|Raises):\n((?:(?:    .*)?\n)+)", re.MULTILINE)


def lacking(node: Definition) -> Iterator[str]:
    """Return the missing parts of the docstring of a public function or class, with its name first."""
    if not isinstance(node, ast.ClassDef):
        yield from _lacking(node, node.name, _docstring(node))
        return
    for part in node.body:
        if not isinstance(part, Function):
            continue
        said = _docstring(part)
        if part.name == "__init__" and not node.name.startswith("_") and node.name not in TABLES["HANDLES"]:
            yield from _lacking(part, node.name, _docstring(node))
        elif not part.name.startswith("_") and not _is_property(part) and not said.startswith(NOT_SAID_TWICE):
            yield from _lacking(part, f"{node.name}.{part.name}", said)


def _lacking(function: Function, name: str, said: str) -> Iterator[str]:
    sections = dict(_SECTION.findall(f"{said}\n"))
    taken = [one.arg for one in _arguments(function.args) if one.arg not in ("self", "cls")]
    explained = re.findall(r"^    (\w+): ", sections.get("Args", ""), re.MULTILINE)
    if taken != explained:
        yield f"{name}: takes {', '.join(taken) or 'nothing'}; Args has {', '.join(explained) or 'nothing'}"
    given = function.returns is not None and ast.unparse(function.returns) not in ("None", "NoReturn")
    if given != ("Returns" in sections):
        yield f"{name}: {'no Returns' if given else 'Returns, of nothing'}"
    if "Raises" not in sections and any(_raised(function)):
        yield f"{name}: no Raises"
    if re.search(r"(?<!`)\bRaises (?!:)\w", said):
        yield f"{name}: errors have a section of their own"


def _docstring(node: Definition) -> str:
    return ast.get_docstring(node) or ""


def _arguments(given: ast.arguments) -> Iterator[ast.arg]:
    yield from (*given.posonlyargs, *given.args)
    yield from filter(None, (given.vararg, *given.kwonlyargs, given.kwarg))


def _is_property(function: Function) -> bool:
    return any(ast.unparse(one).endswith(("property", ".setter")) for one in function.decorator_list)


def _raised(node: ast.AST) -> Iterator[ast.Raise]:
    """Of what a function itself raises; another function inside it is another one."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.Raise) and part.exc is not None:
            yield part
        elif not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _raised(part)


def public() -> dict[str, Definition]:
    """Every public function and class by its full name, as it is written."""
    names = [f"{module}.{name}" for module in kvflow.__public_modules__ for name in TABLES["names_of"](module)]
    return {full: node for full in names if (node := _written(full)) is not None}


def _written(full: str) -> Definition | None:
    module, _, name = full.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except ImportError:  # of a package that is not installed
        folder = ROOT.joinpath(*module.split("."))
        return next(node for path in sorted(folder.glob("*.py")) for node in parsed(path).body if _is(node, name))  # type: ignore[misc]
    found = typing.get_origin(found) or found
    if not inspect.isclass(found) and not inspect.isfunction(found):
        return None
    path = Path(inspect.getsourcefile(inspect.unwrap(found)) or "")
    return next(node for node in parsed(path).body if _is(node, found.__name__))  # type: ignore[misc]


def _is(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


def test_what_is_public_says_what_it_takes_gives_and_raises() -> None:
    found = public()
    assert len(found) > 90
    assert sum(isinstance(part, Function) for node in found.values() for part in ast.walk(node)) > 250
    assert found.keys() >= {"kvflow.Runtime", "kvflow.ray.RayMetrics", "kvflow.testing.InprocPair", *NOT_OURS}
    said = [f"{full}: {what}" for full, node in found.items() if full not in NOT_OURS for what in lacking(node)]
    assert said == []


def test_every_public_name_is_said_to_be_something() -> None:
    """Itself: what a base class says of itself does not count."""
    names = [full for names in TABLES["public_names"]().values() for full in names]
    assert len(names) > 90
    assert [full for full in names if not TABLES["said_of"](full)] == []
    assert "(and must be) strings" not in "".join(map(TABLES["said_of"], names))


GOOD = '''
class Good:
    """One.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None: ...

    @property
    def size(self) -> int:
        """In bytes."""

    async def read(self, key: str, *more: str) -> bytes:
        """Read it.

        Args:
            key: as it was saved; further lines: are no arguments.
                So: is this.
            more: and these.

        Returns:
            The bytes.

        Raises:
            KeyError: there is none.
        """
        raise KeyError(key)

    def _read(self, key: str) -> bytes: ...

    def begin(self, key: str) -> None:
        """Only for the runtime: begin."""
'''


@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ("", "", []),
        ("        size: in bytes.\n", "", ["Good: takes size; Args has nothing"]),
        ("            key: as", "            name: as", ["Good.read: takes key, more; Args has name, more"]),
        ("            more: and these.\n", "", ["Good.read: takes key, more; Args has key"]),
        ("        Returns:\n            The bytes.\n", "", ["Good.read: no Returns"]),
        (") -> bytes:", ") -> None:", ["Good.read: Returns, of nothing"]),
        ("        Raises:\n            KeyError: there is none.\n", "", ["Good.read: no Raises"]),
        ("Read it.", "Raises KeyError.", ["Good.read: errors have a section of their own"]),
        ("def _read", "def load", ["Good.load: takes key; Args has nothing", "Good.load: no Returns"]),
        ("Only for the runtime: begin", "Begin", ["Good.begin: takes key; Args has nothing"]),
    ],
)
def test_what_a_docstring_does_not_say_is_found(right: str, wrong: str, found: list[str]) -> None:
    assert right in GOOD
    (node,) = ast.parse(GOOD.replace(right, wrong, 1)).body
    assert isinstance(node, ast.ClassDef)
    assert list(lacking(node)) == found
