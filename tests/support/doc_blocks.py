"""The fenced blocks of the docs, and a check for each kind of block.

The blocks of a page are checked in order. Python blocks run in one namespace, so that they build on each other. A
comment right above a block, which readers do not see, changes that:

    <!-- anew -->        reset the namespace to the names that the page began with
    <!-- file: NAME -->  append the block to a file; at the end of the page pytest runs on all its files
    <!-- script -->      run the block as a program; the text block after it must equal the program's output

A kind of block, or a command, without a check here is an error.
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
from tests.support.source_trees import parsed

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
    """Ends a script once its parser has parsed the options. `unknown` has the options that the parser does not know."""

    def __init__(self, unknown: list[str]) -> None:
        super().__init__(unknown)
        self.unknown = unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page. `mark` is the text of the comment above it, or ""."""

    where: str
    line: int
    kind: str
    mark: str
    text: str


def blocks_of(page: str, text: str) -> list[Block]:
    """Return all fenced blocks of a page. Raise AssertionError for a fence that is not ``` at the start of a line."""
    found = []
    for match in _FENCED.finditer(text):
        line = text.count("\n", 0, match.start(3))
        block = Block(where=f"{page}:{line}", line=line, kind=match[2], mark=match[1] or "", text=match[3])
        found.append(block)
    assert len(_FENCE.findall(text)) == 2 * len(found), f"{page}: a fence that begins or ends no block"
    return found


async def check_blocks(blocks: list[Block], names: dict[str, Any], folder: Path) -> None:
    """Check all blocks of a page in order. Python blocks read `names` and add to them. Raise the first error."""
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
    """Run a Python block, which may use `await`. Tracebacks have the line numbers of the page."""
    code = compile("\n" * block.line + block.text, block.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        await result


def paste(block: Block) -> None:
    """Compile a block line by line, as an interactive prompt does: an empty line ends a compound statement."""
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    gathered: list[str] = []
    for line in [*block.text.splitlines(), ""]:
        gathered.append(line)
        if compiler("\n".join(gathered), block.where, "single") is not None:
            gathered.clear()
    assert not gathered, f"{block.where}: {gathered} does not end"


def run_script(block: Block, folder: Path) -> str:
    """Run a block as a file, as a reader would after pasting it, and return its output."""
    script = folder / "pasted.py"
    script.write_text(block.text)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{block.where}: {done.stderr}"
    return done.stdout


def run_project(files: dict[str, str], folder: Path) -> None:
    """Write the files of a page to `folder`, and assert that pytest passes there."""
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_other(block: Block) -> None:
    """Check a block that is not run: commands must exist, and data must parse."""
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
        case "":  # a drawing, which cannot be pasted
            assert _DRAWN.search(block.text), f"{block.where}: no drawing; what language is it?"
        case _:
            raise AssertionError(f"{block.where}: nobody checks blocks of kind {block.kind!r}")


# --- commands


def inline_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each kvflow command that the text names in backticks. Options may be missing."""
    for command in _INLINE.findall(_FENCED.sub("", text)):
        yield shlex.split(command)


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a block. A command continues after a backslash and inside quotes."""
    gathered = ""
    for line in text.splitlines():
        gathered += line
        if gathered.endswith("\\"):
            gathered = gathered[:-1]
            continue
        try:
            words = shlex.split(gathered, comments=True)
        except ValueError:  # a quoted text continues on the next line
            gathered += "\n"
            continue
        gathered = ""
        if words:
            yield words
    assert not gathered, f"a command that does not end: {gathered}"


def check_command(words: list[str], *, complete: bool = False) -> None:
    """Assert that a command and its options exist, and, if `complete`, that no required option is missing."""
    match words:
        case ["kvflow", *rest]:
            check_typer(app, rest, complete=complete)
        case ["python3", "dev.py", *rest]:
            check_command(started_by_dev(rest))
        case ["python", "-m", "asyncio" | "codespell_lib" | "mkdocs" | "mypy" | "pytest" | "ruff", *_]:
            pass
        case ["python", "-m", "sglang_router.launch_router", *_]:  # has no option of kvflow
            pass
        case ["python", "-m", "tests.bench", *rest]:
            check_typer(bench, rest, complete=complete)
        case ["python", "-m", "tests.simulator", *rest]:
            check_typer(simulator, rest, complete=complete)
        case ["python", "-m", module, *_] if module.startswith("tests."):
            at = ROOT / module.replace(".", "/")
            assert any(file.is_file() for file in (at / "__main__.py", at.with_suffix(".py"))), words
        case ["python", "-I", command, *rest]:  # dev.py starts a command installed from a wheel like this
            check_command([Path(command).name, *rest])
        case ["python" | ".venv/bin/python", script, *rest]:  # the second is the environment made by dev.py
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
        case ["KVFLOW_AS_NIXL=1", "vllm", "serve", *_]:
            check_vllm(words, "NixlConnector")
        case ["KVFLOW_AS_NIXL=1", "sglang", "serve", *_]:
            check_sglang(words, "nixl")
        case _:
            raise AssertionError(f"nobody checks this command: {words}")


def check_typer(program: typer.Typer, words: list[str], *, complete: bool) -> None:
    command, rest = typer.main.get_command(program), list(words)
    while rest and not _PLACEHOLDER.match(rest[0]) and (commands := getattr(command, "commands", None)):
        assert rest[0] in commands, f"{words}: there are {sorted(commands)}"
        command = commands[rest.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert options_of(rest) <= known, f"{words}: its options are {sorted(known)}"
    if complete and words[:1] == ["keys"]:  # run it: it is cheap, and later blocks of the page use its files
        command.main(rest, standalone_mode=False)
    elif complete:
        command.make_context("kvflow", rest)


def started_by_dev(words: list[str]) -> list[str]:
    """Return the command that `python3 dev.py ...` starts last, once its environment is ready."""
    started: list[list[str]] = []

    def start(*command: object) -> int:
        started.append([str(word) for word in command])
        return 0

    dev = types.ModuleType("dev")
    vars(dev)["__file__"] = str(ROOT / "dev.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "dev", dev)  # dataclasses in dev.py look up their types there
        exec(compile((ROOT / "dev.py").read_text(), "dev.py", "exec"), vars(dev))
    system = types.SimpleNamespace(environ={}, execv=lambda _, command: start(*command), chdir=lambda _: None)
    vars(dev).update(os=system, run=start, check=start, ensure=lambda *_: Path("python"))
    gpu = types.SimpleNamespace(which=lambda name: name, rmtree=lambda _: None)  # pretend that there is a GPU
    vars(dev).update(with_wheels=lambda _: Path("python"), shutil=gpu)
    assert dev.main(words) == 0 or started, f"dev.py {words}: see its first lines"
    return started[-1]


def check_script(script: str, words: list[str]) -> None:
    """Run a script up to its argument parser, and assert that the parser knows all options in `words`."""

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


def check_sglang(words: list[str], backend: str = "kvflow") -> None:
    """Check the options of a `sglang serve` command that concern kvflow, without importing SGLang."""
    known = {"--model-path", "--port", "--disaggregation-mode", "--disaggregation-transfer-backend"} | {"--base-gpu-id"}
    assert options_of(words) <= known, words
    assert words[words.index("--disaggregation-transfer-backend") + 1] == backend, words
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    assert plugins == {"kvflow": "kvflow.sglang:register"}


def check_vllm(words: list[str], connector: str = "KVFlowConnector") -> None:
    """Check the options of a `vllm serve` command that concern kvflow, without importing vLLM."""
    assert options_of(words) <= {"--port", "--kv-transfer-config"}, words
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module = given.get("kv_connector_module_path", plugins["kvflow"].partition(":")[0])
    assert (ROOT / module.replace(".", "/")).is_dir()
    assert given["kv_connector"] == connector
    assert given["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    # Parsed, because importing it needs vLLM.
    tree = parsed(ROOT / "kvflow" / "vllm" / "extra_config.py")
    (extra,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Extra")
    own = {
        node.target.id for node in extra.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert given.get("kv_connector_extra_config", {}).keys() <= own | {entry.name for entry in fields(Config)}


def options_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("-")}
