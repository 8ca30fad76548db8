"""The fenced blocks of the docs, and how each kind of them is checked.

The blocks of a page are taken in order. Its python blocks run in one namespace, so that they build on each other. A
comment right above a block, which readers do not see, says otherwise: `<!-- anew -->` goes back to the names that the
page began with, `<!-- file: NAME -->` adds the block to a file, and pytest is run on the files of a page at its end,
`<!-- script -->` is a program of its own, and the block of text behind it is what it prints, word by word.
A kind of block, or a command, that nobody here knows is an error.
"""

from __future__ import annotations

import argparse
import ast
import codeop
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvflow import Config
from kvflow.cli.app import app
from tests.bench.__main__ import bench
from tests.simulator.__main__ import app as simulator

ROOT = Path(__file__).parents[2]
OF_GITHUB = ("CONTRIBUTING", "RELEASING", "SECURITY", "STYLE")
TOP = ("README.md", "docs/changelog.md", "examples/README.md", *(f".github/{name}.md" for name in OF_GITHUB))
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in [*(ROOT / page for page in TOP), *(ROOT / "docs").rglob("*.md")]
}

_FENCED = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^\s*(```|~~~)", re.MULTILINE)
_DRAWN = re.compile("[─│┌└═║▶◀▼]")
_TEST = re.compile(r"^(async )?def test_", re.MULTILINE)
_PLACEHOLDER = re.compile(r"-|[A-Z]+$")
_INLINE = re.compile(r"`((?:kvflow|python3?) [^`\n]+)`")


class _Parsed(Exception):
    """A script has read its options."""

    def __init__(self, unknown: list[str]) -> None:
        super().__init__(unknown)
        self.unknown = unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block. `mark` is the comment above it, or ""."""

    where: str
    line: int
    kind: str
    mark: str
    text: str


def blocks_of(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page; AssertionError for a fence that is no plain ``` at the start of a line."""
    found = []
    for match in _FENCED.finditer(text):
        line = text.count("\n", 0, match.start(3))
        block = Block(where=f"{page}:{line}", line=line, kind=match[2], mark=match[1] or "", text=match[3])
        found.append(block)
    assert len(_FENCE.findall(text)) == 2 * len(found), f"{page}: a fence that begins or ends no block"
    return found


async def check_blocks(blocks: list[Block], names: dict[str, Any], folder: Path) -> None:
    """Run or check all blocks of a page, which see `names` and add to them; raises whatever is wrong with one."""
    given, files, printed = dict(names), dict[str, str](), ""
    for block in blocks:
        if block.mark == "anew":
            names.clear()
            names.update(given)
        if block.mark.startswith("file: "):
            name = block.mark.removeprefix("file: ")
            files[name] = files.get(name, "") + block.text
        elif block.mark == "script":
            printed = run_script(block, folder)
        elif block.kind == "text":
            assert printed == block.text, f"{block.where}: the script above prints\n{printed}"
        elif block.kind == "python":
            assert not _TEST.search(block.text), f"{block.where}: a test that nobody runs"
            await run_python(block, names)
        else:
            check_other(block)
    if files:
        run_project(files, folder)


async def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run a block, which may await; tracebacks show the page's lines."""
    code = compile("\n" * block.line + block.text, block.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        await result


def paste(block: Block) -> None:
    """Compile a block as a prompt takes it, line by line: a statement with a body ends at an empty line."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    gathered: list[str] = []
    for line in [*block.text.splitlines(), ""]:
        gathered.append(line)
        if compiler("\n".join(gathered), block.where, "single") is not None:
            gathered.clear()
    assert not gathered, f"{block.where}: {gathered} does not end"


def run_script(block: Block, folder: Path) -> str:
    """What a block prints that is run as a file of its own, as a reader would who has pasted it."""
    script = folder / "pasted.py"
    script.write_text(block.text)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{block.where}: {done.stderr}"
    return done.stdout


def run_project(files: dict[str, str], folder: Path) -> None:
    """The files of a page are a project whose tests pass."""
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_other(block: Block) -> None:
    """What is not run as python."""
    match block.kind:
        case "sh":
            for words in commands_of(block.text):
                check_command(words, complete=True)
        case "json":
            json.loads(block.text)
        case "toml":
            tomllib.loads(block.text)
        case "yaml":
            import yaml

            yaml.safe_load(block.text)
        case "":  # nothing that one could paste
            assert _DRAWN.search(block.text), f"{block.where}: no drawing; what language is it?"
        case _:
            raise AssertionError(f"{block.where}: nobody checks blocks of kind {block.kind!r}")


# --- commands


def inline_commands(text: str) -> Iterator[list[str]]:
    """Commands of kvflow within the text; options may be left out of them."""
    for command in _INLINE.findall(_FENCED.sub("", text)):
        yield shlex.split(command)


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command of a block; one goes on after a backslash, and within quotes."""
    gathered = ""
    for line in text.splitlines():
        gathered += line
        if gathered.endswith("\\"):
            gathered = gathered[:-1]
            continue
        try:
            words = shlex.split(gathered, comments=True)
        except ValueError:  # a quotation goes on
            gathered += "\n"
            continue
        gathered = ""
        if words:
            yield words
    assert not gathered, f"a command that does not end: {gathered}"


def check_command(words: list[str], *, complete: bool = False) -> None:
    """A command exists, and so do the options that it is given; one that is complete has all that it needs."""
    match words:
        case ["kvflow", *rest]:
            check_typer(app, rest, complete=complete)
        case ["python3", "dev.py", *rest]:
            check_command(started_by_dev(rest))
        case ["python", "-m", "asyncio" | "codespell_lib" | "mkdocs" | "mypy" | "pytest" | "ruff", *_]:
            pass
        case ["python", "-m", "sglang_router.launch_router", *_]:  # none of kvflow's words
            pass
        case ["python", "-m", "tests.bench", *rest]:
            check_typer(bench, rest, complete=complete)
        case ["python", "-m", "tests.simulator", *rest]:
            check_typer(simulator, rest, complete=complete)
        case ["python", "-m", module, *_] if module.startswith("tests."):
            at = ROOT / module.replace(".", "/")
            assert any(file.is_file() for file in (at / "__main__.py", at.with_suffix(".py"))), words
        case ["python", "-I", command, *rest]:  # as dev.py starts what a wheel has installed
            check_command([Path(command).name, *rest])
        case ["python" | ".venv/bin/python", script, *rest]:  # the second is what dev.py makes
            check_script(script, rest)
        case ["pip", "install", "torch", "--index-url", "https://download.pytorch.org/whl/cpu"]:
            pass
        case ["pip", "install", project]:
            check_extras(project)
        case ["serve", "deploy", config]:
            assert (ROOT / config).is_file(), words
        case ["vllm", "serve", *_]:
            check_vllm(words)
        case ["sglang", "serve", *_]:
            check_sglang(words)
        case _:
            raise AssertionError(f"nobody checks this command: {words}")


def check_typer(program: typer.Typer, words: list[str], *, complete: bool) -> None:
    command, rest = typer.main.get_command(program), list(words)
    while rest and not _PLACEHOLDER.match(rest[0]) and (commands := getattr(command, "commands", None)):
        assert rest[0] in commands, f"{words}: there are {sorted(commands)}"
        command = commands[rest.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert options_of(rest) <= known, f"{words}: its options are {sorted(known)}"
    if complete and words[:1] == ["keys"]:  # cheap, and what follows on the page uses the files
        command.main(rest, standalone_mode=False)
    elif complete:
        command.make_context("kvflow", rest)


def started_by_dev(words: list[str]) -> list[str]:
    """What `python3 dev.py ...` runs last, once the environment is there."""
    started: list[list[str]] = []

    def start(*command: object) -> int:
        started.append([str(word) for word in command])
        return 0

    dev = types.ModuleType("dev")
    vars(dev)["__file__"] = str(ROOT / "dev.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "dev", dev)  # where its dataclasses look their types up
        exec(compile((ROOT / "dev.py").read_text(), "dev.py", "exec"), vars(dev))
    system = types.SimpleNamespace(environ={}, execv=lambda _, command: start(*command), chdir=lambda _: None)
    vars(dev).update(os=system, run=start, check=start, ensure=lambda *_: Path("python"))
    gpu = types.SimpleNamespace(which=lambda name: name, rmtree=lambda _: None)  # a machine that shows one
    vars(dev).update(with_wheels=lambda _: Path("python"), shutil=gpu)
    assert dev.main(words) == 0 or started, f"dev.py {words}: see its first lines"
    return started[-1]


def check_script(script: str, words: list[str]) -> None:
    """The script's own parser takes the words; there the script ends."""

    def take(parser: argparse.ArgumentParser, *_: object) -> None:
        unknown = parser.parse_known_args(words)[1]
        raise _Parsed(unknown)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str((ROOT / script).parent))
        patch.setattr(argparse.ArgumentParser, "parse_args", take)
        with pytest.raises(_Parsed) as caught:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    assert caught.value.unknown == [], f"{script} {words}"


def check_extras(project: str) -> None:
    name, _, extras = project.rstrip("]").partition("[")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert name in ("kvflow", "."), project
    assert {extra for extra in extras.split(",") if extra} <= known.keys(), f"{project}: extras are {sorted(known)}"


def check_sglang(words: list[str]) -> None:
    """The part of it that is kvflow's; SGLang itself is not at hand."""
    known = {"--model-path", "--port", "--disaggregation-mode", "--disaggregation-transfer-backend"} | {"--base-gpu-id"}
    assert options_of(words) <= known, words
    assert words[words.index("--disaggregation-transfer-backend") + 1] == "kvflow", words
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    assert plugins == {"kvflow": "kvflow.sglang:register"}


def check_vllm(words: list[str]) -> None:
    """The part of it that is kvflow's; vLLM itself is not at hand."""
    assert options_of(words) <= {"--port", "--kv-transfer-config"}, words
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module = given.get("kv_connector_module_path", plugins["kvflow"].partition(":")[0])
    assert (ROOT / module.replace(".", "/")).is_dir()
    assert given["kv_connector"] == "KVFlowConnector"
    assert given["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    tree = ast.parse((ROOT / "kvflow" / "vllm" / "settings.py").read_text())  # which imports vLLM
    (extra,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Extra")
    own = {
        node.target.id for node in extra.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert given.get("kv_connector_extra_config", {}).keys() <= own | {entry.name for entry in fields(Config)}


def options_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("-")}
