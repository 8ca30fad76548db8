"""The docs say what the code does."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import yaml
from doc_blocks import PAGES, ROOT, blocks_of, check_blocks, check_command, inline_commands, paste
from doc_engines import SURROUNDINGS, nothing

import kvflow
import kvflow.blocking
from kvflow import Config, Limits, errors
from kvflow.testing import InprocCluster
from tests.support.source_trees import parsed

BEGIN_WORK = ("create_task", "spawn", "run_to_end", "Thread", "OwnerThread", "copy_thread", "StoreThread")


def test_pictures_are_those_that_are_drawn_now() -> None:
    """States from the code's own tables, everything else from docs/data; each is shown on some page, light and dark."""
    drawn = dict(runpy.run_path(str(ROOT / "docs" / "site" / "pictures.py"))["pictures"]())
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").iterdir()}
    assert kept.keys() == drawn.keys()
    assert [name for name in drawn if kept[name] != drawn[name]] == [], "python docs/site/pictures.py draws them"
    shown = "".join(page.read_text() for page in PAGES.values())
    assert [name for name in drawn if f"pictures/{name}" not in shown] == []


def test_tables_that_are_kept_are_those_of_the_code() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "site" / "tables.py"))["pages"]()
    assert len(generated) > 3
    assert [str(p) for p, text in generated.items() if p.read_text() != text] == [], "python docs/site/tables.py"


def test_every_task_and_thread_is_described_where_its_body_is() -> None:
    """By the names that tasks and threads are given in the code."""
    described = runpy.run_path(str(ROOT / "docs" / "site" / "tables.py"))["runs_in"](ROOT / "kvflow")
    known = {name.split()[0] for _, name in described}
    begun = {}
    for path in (ROOT / "kvflow").rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1].strip("_") in BEGIN_WORK:
                for given in (*node.args, *(keyword.value for keyword in node.keywords)):
                    name = given.values[0] if isinstance(given, ast.JoinedStr) else given
                    if isinstance(name, ast.Constant) and str(name.value).startswith("kvflow-"):
                        begun[name.value.split()[0]] = path
    assert len(begun) > 20
    listening = {f"kvflow-listener-{name}" for name in ("requests", "connections", "files", "keys")}
    assert begun.keys() - known == listening, "say it in the docstring of the body: Task `kvflow-NAME`: ..."
    assert "kvflow-listener" in known


def test_links_between_the_docs_lead_somewhere() -> None:
    for page in PAGES.values():
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", page.read_text()):
            target = "".join(target)
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_decisions_are_short_and_in_their_index() -> None:
    folder = ROOT / "docs" / "decisions"
    records = {path.name: path.read_text() for path in folder.glob("0*.md")}
    assert {name: count for name, text in records.items() if (count := len(text.split())) > 500} == {}
    index = (folder / "index.md").read_text()
    assert [name for name in records if f"]({name})" not in index] == []


def test_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600


def test_messages_quoted_in_troubleshooting_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## By message")[1].split("## ")[0]
    source = "".join(path.read_text() for path in (ROOT / "kvflow").rglob("*.py"))
    quoted = [
        piece for cell in re.findall(r"^\| (\".*?) \|", text, re.MULTILINE) for piece in re.findall(r'"(.*?)"', cell)
    ]
    assert len(quoted) > 8
    pieces = {piece.strip() for message in quoted for piece in re.split(r"\.\.\.|(?<=: )ours|, theirs", message)}
    assert [piece for piece in pieces if piece.rstrip(": ") not in source] == []


def test_paths_named_within_the_text_exist() -> None:
    """In the checkout, in the package or among the examples."""
    folders = [ROOT, ROOT / "kvflow", ROOT / "examples"]
    named = {(page, path) for page, file in PAGES.items() for path in _PATH.findall(file.read_text())}
    assert len(named) > 20
    assert sorted((page, path) for page, path in named if not any((at / path).exists() for at in folders)) == []


def test_public_hosting_calls_commands_that_exist() -> None:
    """Workflows, forms and hooks are read; each command is one of dev.py's, with every value of a job's matrix."""
    files = [ROOT / ".pre-commit-config.yaml", *(ROOT / ".github").rglob("*.yml")]
    read = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert len(read) > 3
    run = 0
    for name in ("test.yml", "thorough.yml", "docs.yml", "publish.yml"):
        for job in read[name]["jobs"].values():
            ours = (step for step in job["steps"] if not step.get("run", "sudo apt-get ").startswith("sudo apt-get "))
            for step in ours:
                for command in job.get("strategy", {}).get("matrix", {}).get("command", [""]):
                    words = step["run"].replace("${{ matrix.command }}", command)
                    check_command(shlex.split(words.replace("$TAG", f"v{kvflow.__version__}")))
                    run += 1
    assert run >= 10
    form = {part.get("id"): part for part in read["bug.yml"]["body"]}
    assert form["doctor"]["attributes"]["label"] == "kvflow doctor --json"
    assert form["doctor"]["validations"]["required"]


def test_settings_named_in_operations_exist() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    tuned = text.split("## What to tune")[1].split("## ")[0]
    named = re.findall(r"^\| `([\w.]+)`", tuned, re.MULTILINE)
    assert len(named) > 5
    limits = {f"limits.{field.name}" for field in fields(Limits)}
    assert set(named) <= limits | {field.name for field in fields(Config)}


_MEMBER = re.compile(r"`[^`\n]*?(?<!\.)\b(runtime|load|lease)\.(?!py\b)(\w+)[^`\n]*`")
_PATH = re.compile(r"`((?:\w+/)+\w+(?:\.py)?)`")
GROUPS = {errors.KVFlowError, errors.InvalidInput, errors.RuntimeUnavailable, errors.PeerError, errors.LoadError}
GROUPS |= {errors.StoreError}
RAISED = {
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.KVFlowError) and kind not in GROUPS
}


def test_each_error_says_what_to_do_and_to_retry_where_it_is_worth_it() -> None:
    """In the second paragraph of its docstring. An error that is not retryable would occur again."""
    advice = {kind: (kind.__doc__ or "").partition("\n\n")[2].strip() for kind in RAISED}
    assert [kind.__name__ for kind, said in advice.items() if not said] == []
    retried = {kind for kind, said in advice.items() if "retry " in said.lower()}
    assert retried, "the test saw nothing"
    assert [kind.__name__ for kind in retried if not kind.retryable] == []


@pytest.mark.parametrize("page", PAGES)
async def test_every_block_runs_or_parses(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the decision records, if one gets any."""
    cluster, blocks = InprocCluster(), blocks_of(page, PAGES[page].read_text())
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(kvflow, "Runtime", partial(kvflow.Runtime, world=cluster.world()))
        async with SURROUNDINGS.get(page, nothing)(cluster, patch) as names:
            await check_blocks(blocks, names, tmp_path)


def test_what_is_to_be_pasted_at_a_prompt_can_be() -> None:
    """That it runs is what the test above is for."""
    told = {page: text for page, path in PAGES.items() if "`python -m asyncio`" in (text := path.read_text())}
    assert "docs/tutorials/asyncio.md" in told
    for page, text in told.items():
        for block in blocks_of(page, text):
            if block.kind == "python":
                paste(block)


def test_what_a_prompt_does_not_take_is_found() -> None:
    (block,) = blocks_of("page.md", "```python\nfor name in ():\n    print(name)\nprint()\n```\n")
    with pytest.raises(SyntaxError):
        paste(block)


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_the_text_exist(page: str) -> None:
    for words in inline_commands(PAGES[page].read_text()):
        check_command(words)


def test_members_named_within_the_text_exist() -> None:
    """Of what users hold, in asyncio or in threads."""
    kinds = {"runtime": "Runtime", "load": "Load", "lease": "Lease"}
    for page, path in PAGES.items():
        for held, member in re.findall(_MEMBER, path.read_text()):
            both = [getattr(module, kinds[held]) for module in (kvflow, kvflow.blocking)]
            assert any(hasattr(kind, member) for kind in both), f"{page}: {held}.{member}"


@pytest.mark.parametrize(
    "wrong",
    [
        "```python\nkvflow.Runtime()\n```",
        "```python\nimport kvflow\nkvflow.Config(engine='e')\n```",
        "```python\nimport asyncio\nawait asyncio.wait_for(asyncio.Event().wait(), 0)\n```",
        "```python\nx = 1\n```\n<!-- anew -->\n```python\nx\n```",
        "```python\ndef test_nobody_runs(): ...\n```",
        "<!-- file: test_it.py -->\n```python\ndef test_it(): assert False\n```",
        "<!-- file: test_it.py -->\n```python\nno_test = True\n```",
        "```sh\nkvflow bench nothing\n```",
        "```sh\npython3 dev.py simulate --sedes 5\n```",
        "```sh\nkvflow bench transfer --rounds many\n```",
        "```sh\nkvflow keys new\n```",
        "```sh\npython3 dev.py nothing\n```",
        "```sh\npython3 dev.py serve --nothing 2\n```",
        "```sh\nkvflow trace 'without an end\n```",
        "```sh\npip install 'kvflow[nothing]'\n```",
        "```sh\nvllm serve MODEL --kv-transfer-config '{}'\n```",
        "```sh\ncurl http://127.0.0.1\n```",
        "```json\n{'a': 1}\n```",
        "```toml\na = b\n```",
        "```yaml\na: [\n```",
        "```mermaid\nstateDiagram-v2\n```",
        "<!-- script -->\n```python\nraise SystemExit(1)\n```",
        "<!-- script -->\n```python\nprint(1)\n```\n```text\n2\n```",
        "```text\nprinted by nobody\n```",
        "```\nkvflow doctor\n```",
        "```rust\nfn main() {}\n```",
        "- in a list\n  ```sh\n  rm -r /\n  ```",
        "~~~sh\nrm -r /\n~~~",
        "```python\n",
    ],
)
async def test_a_block_that_is_wrong_is_found(wrong: str, tmp_path: Path) -> None:
    with pytest.raises((Exception, SystemExit)):
        await check_blocks(blocks_of("page.md", wrong + "\n"), {}, tmp_path)


def test_a_command_within_the_text_that_is_wrong_is_found() -> None:
    (words,) = inline_commands("Ask `kvflow doctor --nothing`, not `kvflow-poller`.")
    with pytest.raises(AssertionError, match="its options are"):
        check_command(words)


def test_files_for_a_change_exist() -> None:
    text = (ROOT / "docs" / "changing.md").read_text("utf-8")
    named = set(re.findall(r"`((?:kvflow|tests|docs)/[\w./-]+|[\w-]+\.(?:toml|py))`", text))
    assert len(named) > 30, "the test saw nothing"
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
