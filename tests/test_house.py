"""The rules of the house (docs/architecture.md): allowed imports, purity, and public names."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import runpy
import subprocess
import sys
import types
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import kvflow
from tests.bars import CORE_RING, loaded_by_import
from tests.support.source_trees import parsed

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvflow"


class Trees(Mapping[str, ast.Module]):
    """Files by their paths from the root, each parsed once, when it is looked at: every worker collects this file."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = {path.relative_to(ROOT).as_posix(): path for path in paths}

    def __getitem__(self, path: str) -> ast.Module:
        return parsed(self._paths[path])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


BENCH_FILES = {path for path in (ROOT / "tests/bench").rglob("*.py") if not path.name.startswith("test_")}
BENCH_FILES |= {path for path in (ROOT / "tests/simulator").rglob("*.py") if not path.name.startswith("test_")}
BENCH_FILES |= {ROOT / "tests/bars.py", *(ROOT / "tests/gpu").rglob("*.py")}
"""Programs for work on kvflow: checked like the package, since they are no tests."""
SOURCES = Trees(PACKAGE.rglob("*.py"))
BENCHES = Trees(BENCH_FILES)
OTHER_ENGINES = ("ray", "sglang", "vllm")
TESTS = Trees(
    path
    for path in (ROOT / "tests").rglob("*.py")
    if path not in BENCH_FILES
    if path.relative_to(ROOT).parts[1] not in OTHER_ENGINES  # real servers are polled
)
APART = Trees(path for name in OTHER_ENGINES for path in (ROOT / "tests" / name).rglob("*.py"))
PROGRAM_FILES = ChainMap(SOURCES, BENCHES)

RINGS = {
    "core": CORE_RING,
    "parts": ("failover", "growing", "prefix", "staging", "stock", "storage", "verify"),
    "integrations": ("attention_backends", "blocking", "connector", "observe", "ray", "sglang", "vllm"),
    "tools": ("bench", "cli", "doctor", "testing"),
}
"""From the inside out, "" being `kvflow` itself. An import is one whether it is to run, to run later, or of a type."""
RING_OF = {part: ring for ring, parts in RINGS.items() for part in parts}


def parts_that_need_parts() -> dict[str, set[str]]:
    """Return the table of docs/architecture.md: no part imports another one, but for these."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = text.partition("<!-- parts -->")[2].partition("<!-- /parts -->")[0]
    needs: dict[str, set[str]] = {}
    for part, needed in re.findall(r"^\| `(\w+)` \| `(\w+)` \|", rows, re.MULTILINE):
        needs.setdefault(part, set()).add(needed)
    assert needs.keys() <= set(RINGS["parts"]) >= set().union(*needs.values())
    return needs


PARTS_THAT_NEED_PARTS = parts_that_need_parts()

WITHIN_RINGS = [
    ["errors"],
    ["checks"],
    ["extras", "forks", "hosts", "limits", "logs", "parts", "secret_ids", "threads"],
]
WITHIN_RINGS += [["config"], ["core"], ["transport"], ["runtime"], [""]]
WITHIN_RINGS += [["attention_backends", "blocking", "observe"], ["connector"], ["ray", "sglang", "vllm"]]
WITHIN_RINGS += [["testing"], ["bench"], ["doctor"], ["cli"]]
"""Imports point up this list where they stay within a ring. Modules of one row do not import each other."""
ROW_OF = {part: row for row, parts in enumerate(WITHIN_RINGS) for part in parts}
PROGRAMS = ("bench", "doctor", "cli")
IMPURE = {"asyncio", "torch", "nixl", "zmq", "time", "os", "socket", "random", "threading", "select", "subprocess"}
IMPURE |= {"secrets", "uuid", "datetime", "logging", "io", "pathlib", "sys", "signal", "multiprocessing", "uvloop"}

_PURE_OF_CONNECTORS = ("consumers", "paged_groups", "parameters", "prefix_questions", "producers")
_PURE_OF_CONNECTORS += ("scheduler", "scheduling_config", "cached_prompts", "step")
_PURE_OF_CONNECTORS += ("kv_hints", "plugin_settings", "request_states")
PURE_HALVES = {
    "connector": _PURE_OF_CONNECTORS,
    "growing": ("decline_request",),
    "prefix": (
        *("keys", "kv_events/batches", "kv_events/prefix_map"),
        *("hand_on_request", "load_rates", "prefix_cache", "seek_request", "testing"),
    ),
    "stock": ("deadline", "engine_ranks", "metadata_conversion", "params", "texts", "versions", "wire"),
    "storage": ("entry", "index", "placing"),
    "staging": ("whole_blocks",),
    "verify": ("digest_request", "digests"),
}
"""Decisions of parts and integrations, as pure as the core's."""
ALSO_PURE = {f"kvflow/{part}/{name}.py" for part, names in PURE_HALVES.items() for name in names}

# The bench measures kvflow against bare NIXL, and against other libraries.
COMPARED_WITH_KVFLOW = {"kvflow/bench/raw.py", "tests/bench/transfer/raw.py", "tests/gpu/raw.py"}
COMPARED_WITH_KVFLOW |= {
    f"tests/bench/peers/{name}.py" for name in ("lmcache", "mooncake", "nixl_connect", "rdt", "torch_transport")
}

# The library waits for events. Where a peer sends none it looks again and again, with growing pauses and a bound.
LOOKING_AGAIN = {
    "kvflow/runtime/channel/asking.py": "a listener drops all connections when it has too many",
    "kvflow/runtime/channel/listening.py": "nobody tells that open files are used up, or that there are some again",
    "kvflow/runtime/peers/table.py": "a rank may have no room for a question that waits",
    "kvflow/ray/peers.py": "Serve tells its own routers only when replicas come and go",
    "kvflow/ray/ray_metrics.py": "Ray's gauges are set, not asked for: they are set every few seconds",
}

# Where kvflow writes to its log is `logs.logger_of`, which lets no text begin a line. Loggers that nothing is told to:
LOGGERS_AS_A_WHOLE = {
    "kvflow/vllm/connector.py": "kvflow's lines go where vLLM's go",
    "kvflow/testing/cancel.py": "lines of runs that are over are kept back",
}
DOUBLES_MAX = 5
LOG_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")

# Tests whose subject is time itself, each with the reason.
_LANDED = ("growing", "growing_failed", "growing_progress", "growing_looks", "extending", "late_blocks")
SLEEPING_TESTS = {
    **{f"tests/growing/test_{name}.py": "virtual time: what has landed when some has passed" for name in _LANDED},
    "tests/testing/test_virtual_loop.py": "what is tested is the passing of virtual time",
    "tests/testing/test_cancel.py": "virtual time: what is cancelled waits while it passes",
    "tests/runtime/test_fair_reads.py": "virtual time: loads begin although nothing happens",
    "tests/failover/test_standing.py": "virtual time: loads stand still while it passes",
    "tests/runtime/test_events.py": "virtual time: what is tested is that nothing has happened when some has passed",
    "tests/growing/test_rendezvous.py": "virtual time: what is tested is that one leg waits for the other",
    "tests/test_logs.py": "virtual time: leases run out, and questions find nothing, while it passes",
    "tests/test_secrets.py": "virtual time: leases run out, and questions find nothing, while it passes",
    "tests/observe/observed.py": "virtual time: what is observed is when tokens were computed and when they landed",
    "tests/runtime/test_cancelled_everywhere.py": "virtual time: a prompt is computed in steps, and questions run out",
    "tests/testing/test_loads.py": "virtual time: what is tested is what goes on when some has passed",
    "tests/runtime/test_keeping.py": "virtual time: what is tested is what is left when much of it has passed",
    "tests/bench/test_clocks.py": "what is tested measures how long the loop was blocked",
    "tests/endurance/consumer.py": "an endurance run draws when a load is cancelled, or its second leg begins",
    "tests/endurance/fleet.py": "an endurance run draws when a fault happens, and samples now and then",
    "tests/endurance/homes.py": "an endurance run looks until nothing is under way",
    "tests/endurance/producer.py": "an endurance run computes prompts in steps that take their time",
    "tests/support/engine.py": "loads begin at random moments around the end of their leases",
    "tests/accelerator/standin.py": "waits for the build of another process, with a bound",
    "tests/bench/test_child.py": "waits for the kernel to change the state of a process, with a bound",
}

# Where a hash is of a secret, and FIPS mode has to allow it: by HMAC of an approved one.
HASHES_OF_SECRETS = {"kvflow/sglang/manager.py": "names of requests, which whoever knows them may read"}
_HASHES = {"new", "file_digest", "md5", "sha1", "sha224", "sha256", "sha384", "sha512", "blake2b", "blake2s"}
_HASHES |= {"sha3_224", "sha3_256", "sha3_384", "sha3_512", "shake_128", "shake_256", "pbkdf2_hmac", "scrypt"}

# What only keeps a test from hanging is long: no test depends on how fast a host is. A test of a bound sets kvflow's.
BOUND_LEAST_S = 60
PROCESS_LEAST_S = 240
"""A process imports torch first; on a machine that does other things that alone has taken a minute and a half."""
SHORT_BOUNDS = {
    "tests/testing/test_virtual_loop.py": "virtual time passes only when nothing else can happen",
    "tests/fuzz/attackers.py": "an attacker that does not get through goes on with the next attack",
}


def part_of(name: str) -> str:
    """The part of kvflow that a file or a dotted name belongs to; "" for kvflow itself."""
    pieces = name.removesuffix(".py").replace("/", ".").split(".")[1:]
    return pieces[0] if pieces and pieces[0] != "__init__" else ""


def imports(path: str, tree: ast.Module) -> Iterator[str]:
    """The dotted name of everything imported anywhere in a file, names from a package in full."""
    for node in nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                here = path.removesuffix(".py").split("/")[:-level] if level else []
                start = [*here, *([module] if module else [])]
                yield from (".".join([*start, alias.name]) for alias in names)
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                match node.args:
                    case [ast.Constant(value=str(name)), *_]:
                        yield name
                    case _:
                        yield "<computed>"


@functools.cache
def importers(package: str) -> set[str]:
    return {path for path, tree in SOURCES.items() if package in {name.split(".")[0] for name in imports(path, tree)}}


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All of a file: each is walked through once."""
    return tuple(ast.walk(tree))


@functools.cache
def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Return the dotted name of each called function, and the call."""
    return [(text_of(node.func), node) for node in nodes(tree) if isinstance(node, ast.Call)]


def text_of(node: ast.expr) -> str:
    """As `ast.unparse`, which takes fifty times as long for a dotted name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{text_of(value)}.{name}"
        case _:
            return ast.unparse(node)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- imports


def test_the_checks_see_the_house() -> None:
    """Guards the tests below against looking at nothing."""
    assert {part_of(path) for path in SOURCES} >= {"errors", "config", "core", "transport", "runtime", ""}
    assert "kvflow.errors.ConfigError" in set(imports("kvflow/config.py", SOURCES["kvflow/config.py"]))
    relative = ast.parse(
        "from ...core.plan import topology\nfrom . import agents\nimport importlib\nimportlib.import_module('x.y')"
    )
    found = set(imports("kvflow/transport/nixl/loop.py", relative))
    assert found == {"kvflow.core.plan.topology", "kvflow.transport.nixl.agents", "importlib", "x.y"}


def test_the_rings_are_drawn_as_they_are() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "site" / "pictures.py"))["RINGS"]
    folders = {
        ring: {name for name in names if (ROOT / "kvflow" / name / "__init__.py").is_file()}
        for ring, names in RINGS.items()
    }
    folders["core"].discard("")
    assert {ring: set(names) for ring, names in drawn.items()} == folders


def test_imports_point_to_the_inner_rings() -> None:
    assert {part_of(path) for path in SOURCES} == set(RING_OF)
    assert sorted(f"{module_of(path)} -> {module_of(file)}" for path, file in outward_imports()) == []


def outward_imports() -> set[tuple[str, str]]:
    """Yield each file, and the imports of the file that point outwards."""
    pairs = {(path, file) for path, tree in SOURCES.items() for name in imports(path, tree) if (file := file_of(name))}
    assert len(pairs) > 1000, "the test saw nothing"
    return {(path, file) for path, file in pairs if points_outwards(part_of(path), part_of(file))}


def points_outwards(part: str, other: str) -> bool:
    """Programs may also use kvflow as its users do: `from kvflow import Config`."""
    ring, theirs = (list(RINGS).index(RING_OF[name]) for name in (part, other))
    if part == other or ring != theirs:
        return ring < theirs
    return other not in PARTS_THAT_NEED_PARTS.get(part, ()) if ring == 1 else ROW_OF[other] >= ROW_OF[part]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


RUNTIME_ROWS: tuple[tuple[str, ...], ...] = (
    ("clock", "copy_thread", "memory", "open_files", "records", "tasks"),
    ("channel/",),
    ("world", "peers/peer", "peers/first_contacts"),
    ("rank",),
    ("peers/",),
    (
        *("producer/blocks", "producer/lease", "load/requests", "load/flight_resources", "load/flight", "load/plan"),
        *("load/load", "load/reads"),
    ),
    ("statistics", "optional"),
    ("producer/", "load/"),
    ("part",),
    ("incarnation",),
    ("registration",),
    ("supervisor",),
    ("runtime",),
)
"""The files of `kvflow/runtime`, from below. "peers/": all of that folder except files in another row. A file may
import rows before its own and, of its own row, its own folder.
"""


def test_every_file_of_the_runtime_has_a_row_and_imports_what_is_below() -> None:
    files = {path.removeprefix("kvflow/runtime/").removesuffix(".py") for path in SOURCES if "/runtime/" in path}
    files = {name for name in files if not name.endswith("__init__")}
    named = [name for row in RUNTIME_ROWS for name in row]
    assert len(named) == len(set(named))
    for name in named:
        assert name in files or any(file.startswith(name) and name.endswith("/") for file in files), f"no file: {name}"
    seen = 0
    for file in files:
        for name in imports(f"kvflow/runtime/{file}.py", SOURCES[f"kvflow/runtime/{file}.py"]):
            other = file_of(name).removeprefix("kvflow/runtime/").removesuffix(".py")
            if other in files and other != file:
                seen += 1
                same_folder = "/" in file and other.startswith(file.rpartition("/")[0] + "/")
                below = _row_of(other, named) < _row_of(file, named)
                assert below or (same_folder and _row_of(other, named) == _row_of(file, named)), f"{file} -> {other}"
    assert seen > 100, "the test saw nothing"


def _row_of(file: str, named: Sequence[str]) -> int:
    """Return the index of the row of a file. Fails for a file without one."""
    name = file if file in named else file.rpartition("/")[0] + "/"
    assert name in named, f"{file}.py has no row"
    return next(row for row, names in enumerate(RUNTIME_ROWS) if name in names)


def test_no_imports_go_in_circles() -> None:
    """Whether an import is to run, to run later, or of a type."""
    targets = {
        path: {file for name in imports(path, tree) if (file := file_of(name)) and file != path}
        for path, tree in SOURCES.items()
    }
    assert sum(map(len, targets.values())) > 1000, "the test saw nothing"
    while leaves := {path for path, others in targets.items() if not others & targets.keys()}:
        targets = {path: others for path, others in targets.items() if path not in leaves}
    # What is left is in a circle, or imports one: without the latter, it is the circles.
    while tops := targets.keys() - {other for others in targets.values() for other in others}:
        targets = {path: others for path, others in targets.items() if path not in tops}
    assert sorted(targets) == []


HUBS_MAX = {"RankContext": 12, "Incarnation": 12, "PartHost": 13}
"""Number of fields or attributes of what many could reach through."""


def test_nothing_hangs_on_one_object() -> None:
    """The object that makes all others is known only where they end, and keeps little. A rank has few facts."""
    makers = {
        path
        for path in SOURCES
        if "kvflow.runtime.incarnation" in {m.rpartition(".")[0] for m in imports(path, SOURCES[path])}
    }
    assert makers == {f"kvflow/runtime/{name}.py" for name in ("registration", "supervisor")}
    for path in ("rank", "incarnation", "part"):
        for node in nodes(SOURCES[f"kvflow/runtime/{path}.py"]):
            if isinstance(node, ast.ClassDef) and node.name in HUBS_MAX:
                names = {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
                names |= {
                    target.attr
                    for item in ast.walk(node)
                    if isinstance(item, ast.Assign | ast.AnnAssign)
                    for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
                    if isinstance(target, ast.Attribute) and text_of(target.value) == "self"
                }
                assert 0 < len(names) <= HUBS_MAX[node.name], f"{node.name}: {sorted(names)}"


def test_the_seam_to_the_parts_has_types() -> None:
    """The core reaches parts by the attributes of `optional`: nothing else imports a part, and nothing there is Any."""
    by_name = {
        path
        for path, tree in SOURCES.items()
        if ring_of(path) == "core"
        for name, _ in calls(tree)
        if name == "import_part"
    }
    assert by_name == {"kvflow/parts.py", "kvflow/runtime/optional.py"}
    for path in ("optional", "part", "rank"):
        tree = SOURCES[f"kvflow/runtime/{path}.py"]
        found = {
            ast.unparse(node)
            for node in nodes(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if "Any" in text_of_annotations(node)
        }
        assert found == set(), path


PARTS_CHOSEN_IN = {
    "kvflow/config.py": {"staging"},  # the setting
    "kvflow/runtime/incarnation.py": {"staging", "verify"},
    "kvflow/runtime/load/leases.py": {"growing"},
    "kvflow/runtime/load/loader.py": {"failover", "growing", "verify"},
    "kvflow/runtime/load/steps.py": {"growing", "staging", "verify"},
    "kvflow/runtime/memory.py": {"staging"},  # the host blocks that peers read in place of the cache
    "kvflow/runtime/optional.py": {"failover", "growing", "staging", "verify"},
    "kvflow/runtime/runtime.py": {"growing"},
    "kvflow/transport/base.py": {"staging"},  # whether a transport reaches a device
}
"""Where the core enters a part (docs/architecture.md#parts). Everywhere else its code does not name one."""
NAMED_PARTS = {"failover", "growing", "staging", "stock", "verify"}
PUBLIC_OF_PARTS = {"verify", "verify_share", "VERIFY"}
"""Settings and phases of users, which stay when the part is deleted."""


def test_the_core_names_a_part_where_it_chooses_and_nowhere_else() -> None:
    named: dict[str, set[str]] = {}
    for path, tree in SOURCES.items():
        for node in nodes(tree) if ring_of(path) == "core" else ():
            text = str(getattr(node, "attr", None) or getattr(node, "name", None) or getattr(node, "id", ""))
            called = isinstance(node, ast.Attribute) and text_of(node.value).endswith("optional")
            if text not in PUBLIC_OF_PARTS or called:
                for part in NAMED_PARTS & set(text.lower().split("_")):
                    named.setdefault(path, set()).add(part)
    assert named == PARTS_CHOSEN_IN


def ring_of(path: str) -> str:
    return RING_OF[part_of(path)]


def text_of_annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = [one.annotation for one in given if one.annotation is not None]
    return " ".join(ast.unparse(one) for one in [*annotations, *([node.returns] if node.returns else [])])


def test_tables_of_rules_name_what_exists() -> None:
    """An entry that names no file protects nothing."""
    tables: list[Iterable[str]] = [ALSO_PURE, COMPARED_WITH_KVFLOW, LOOKING_AGAIN, LOGGERS_AS_A_WHOLE, SLEEPING_TESTS]
    tables += [HASHES_OF_SECRETS, SHORT_BOUNDS]
    assert [path for table in tables for path in table if not (ROOT / path).is_file()] == []
    assert [name for name in RING_OF if name and not list(PACKAGE.glob(f"{name}*"))] == []


def test_core_is_pure() -> None:
    for path, tree in SOURCES.items():
        if part_of(path) == "core" or path in ALSO_PURE:
            found = {name.split(".")[0] for name in imports(path, tree)}
            assert not found & IMPURE, path
            assert "<computed>" not in found, path
            assert not {name for name, _ in calls(tree)} & {"open", "print", "input", "exec", "eval"}, path


def test_every_pure_file_of_a_part_is_kept_pure() -> None:
    """A file counts as pure if it imports nothing impure, and of kvflow only the core's decisions and pure files."""
    targets = {
        path: {file for name in imports(path, tree) if (file := file_of(name))} for path, tree in SOURCES.items()
    }
    plain = {f"kvflow/{name}.py" for name in ("errors", "checks", "limits", "logs", "config", "hosts", "secret_ids")}
    known = plain | {path for path in SOURCES if part_of(path) == "core"}
    pure = {path for path, tree in SOURCES.items() if not {name.split(".")[0] for name in imports(path, tree)} & IMPURE}
    while impure := {path for path in pure - known if not targets[path] <= pure | known}:
        pure -= impure
    of_parts = {path for path in pure if part_of(path) in (*RINGS["parts"], "connector") if "__init__" not in path}
    assert len(of_parts) > 20, "the test saw nothing"
    assert sorted(of_parts - ALSO_PURE) == []


def test_core_loads_without_torch_zmq_nixl_and_asyncio() -> None:
    """Also what core imports indirectly is pure."""
    modules = [path.removesuffix(".py").replace("/", ".") for path in SOURCES if part_of(path) == "core"]
    assert {"kvflow.core.cache.layout", "kvflow.core.protocol.proof"} <= set(modules)
    code = f"""
import sys, types
package = types.ModuleType("kvflow")
package.__path__ = ["kvflow"]
sys.modules["kvflow"] = package
import {", ".join(sorted(modules))}
print(*sorted(name for name in ("torch", "zmq", "nixl", "asyncio", "kvflow.transport") if name in sys.modules))
"""
    assert run_python(code) == ""


def test_nixl_and_zmq_have_one_home_each() -> None:
    assert importers("nixl") - COMPARED_WITH_KVFLOW == {"kvflow/transport/nixl/native.py"}
    channel = ("asking", "connections", "listening", "keyring")
    others = {"kvflow/stock/metadata.py", "kvflow/sglang/manager.py"}  # the wires of other engines
    others |= {f"kvflow/prefix/kv_events/{name}.py" for name in ("following", "publishing", "sockets")}
    assert importers("zmq") == {f"kvflow/runtime/channel/{name}.py" for name in channel} | others


def test_what_kvflow_is_compared_with_runs_none_of_it() -> None:
    """The raw contenders of the bench: they, and the modules that they import, use only the bench of kvflow."""
    found, rest = set[str](), [*COMPARED_WITH_KVFLOW, "tests/bench/transfer/ranks.py"]
    while rest:
        path = rest.pop()
        for name in imported_to_run(path):
            file = file_of(name)
            if name.split(".")[0] in ("kvflow", "tests") and file not in found:
                assert part_of(file) == "bench", f"{path} imports {name}"
                found.add(file)
                rest.append(file)
    assert found >= {f"kvflow/bench/{name}.py" for name in ("cache", "loads", "raw")}


def file_of(name: str) -> str:
    """Where an imported module is, or the module that an imported name is of."""
    bases = [part.replace(".", "/") for part in (name, name.rpartition(".")[0])]
    return next((path for base in bases for path in (f"{base}.py", f"{base}/__init__.py") if path in PROGRAM_FILES), "")


def imported_to_run(path: str) -> Iterator[str]:
    """Return the imports without those for types only."""
    body = PROGRAM_FILES[path].body
    needed = [node for node in body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    return imports(path, ast.Module(body=needed, type_ignores=[]))


def test_nothing_can_run_code_from_a_message() -> None:
    for package in ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"):
        assert importers(package) == set()
    for path, tree in SOURCES.items():
        names = {name for name, _ in calls(tree)}
        assert not names & {"eval", "exec", "torch.load"}, path
        assert not {name for name in names if name.endswith(("send_pyobj", "recv_pyobj"))}, path


def test_the_bars_count_what_an_import_loads() -> None:
    code = """
import sys, kvflow
print(*{m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "kvflow" and m.__file__}, sep="\\n")
"""
    assert {Path(name) for name in run_python(code).splitlines()} == set(loaded_by_import(PACKAGE))


@pytest.mark.parametrize("module", ["connector/scheduler.py", "connector/worker.py", "vllm/connector.py"])
def test_a_connector_loads_no_part_that_its_engine_has_not_asked_for(module: str) -> None:
    """Deleted parts are missed only by the settings that need them; parts that are named in a list are such."""
    loaded = {path.relative_to(PACKAGE).parts[0] for path in loaded_by_import(PACKAGE, module)}
    assert {"connector", "core", "runtime"} <= loaded
    assert not loaded & {"prefix", "stock", "storage"}


def test_importing_kvflow_loads_neither_nixl_nor_zmq_nor_torch() -> None:
    """Engines import kvflow long before they know whether they transfer; nixl starts threads when it loads."""
    unwanted = {"nixl", "nixl_cu12", "torch", "zmq"}
    code = f"import sys, kvflow; print(*sorted({{n.split('.')[0] for n in sys.modules}} & {unwanted}))"
    assert run_python(code) == ""


WITHOUT_NIXL = """
import asyncio, sys

sys.modules["nixl"] = None
import kvflow

async def main():
    try:
        async with kvflow.Runtime(kvflow.Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="nixl")):
            print("opened")
    except kvflow.errors.ConfigError as error:
        print(error)
    async with kvflow.Runtime(kvflow.Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="inproc")):
        print("inproc works")

asyncio.run(main())
"""


def test_without_nixl_kvflow_imports_and_says_what_to_install() -> None:
    message, inproc = run_python(WITHOUT_NIXL).splitlines()
    assert "'nixl'" in message
    assert "pip install nixl" in message
    assert inproc == "inproc works"


# --- public names


def test_all_is_what_exists() -> None:
    """Submodules become attributes by being imported; only `errors` is meant to be public."""
    public = {
        name
        for name, value in vars(kvflow).items()
        if not name.startswith("_") and (not isinstance(value, types.ModuleType) or name == "errors")
    }
    assert public == set(kvflow.__all__)
    assert len(kvflow.__all__) == len(set(kvflow.__all__))
    assert kvflow.__all__ == sorted(kvflow.__all__)


@pytest.mark.parametrize("module", kvflow.__public_modules__)
def test_public_modules_name_what_they_define_or_hand_on(module: str) -> None:
    place = ROOT / module.replace(".", "/")
    tree = SOURCES[(place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).relative_to(ROOT).as_posix()]
    bound = {name for node in nodes(tree) for name in _names_bound(node)}
    (names,) = (ast.literal_eval(node.value) for node in tree.body if "__all__" in _names_bound(node))  # type: ignore[attr-defined]
    assert set(names) <= bound
    assert len(names) == len(set(names)), "ruff sorts them"


def _names_bound(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            yield name
        case ast.ImportFrom(names=names):
            yield from (found.asname or found.name for found in names)
        case ast.Assign(targets=[ast.Name(id=name)]):
            yield name


def test_a_class_name_means_one_thing() -> None:
    """But for the handles in threads, which are those of asyncio; new doubles are named apart."""
    defined = Counter(node.name for tree in SOURCES.values() for node in nodes(tree) if isinstance(node, ast.ClassDef))
    twice = sorted(name for name, count in defined.items() if count > 1)
    assert len(twice) <= DOUBLES_MAX, twice


# --- shape of the code


def test_every_module_says_what_it_is() -> None:
    for path, tree in SOURCES.items():
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        assert len(first) > 20, f"{path}: {first!r}"
        assert first.endswith((".", ":")), f"{path}: {first!r}"


def hashes_for_security(tree: ast.AST) -> list[str]:
    """Hashes that Python may refuse on a host in FIPS mode: not said to be of no secret."""
    imported = {name.asname or name.name for node in nodes(tree) for name in _imported_from(node, "hashlib")}
    found = []
    for name, call in calls(tree):
        module, _, function = name.rpartition(".")
        hashes = (module == "hashlib" and function in _HASHES) or (not module and function in imported & _HASHES)
        plain = any(
            keyword.arg == "usedforsecurity" and ast.unparse(keyword.value) == "False" for keyword in call.keywords
        )
        if (hashes and not plain) or module == "hmac":
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


def _imported_from(node: ast.AST, module: str) -> Sequence[ast.alias]:
    return node.names if isinstance(node, ast.ImportFrom) and node.module == module else ()


HASHED = """
hashlib.sha256(b"")
hashlib.blake2b(b"", digest_size=8)
hashlib.new("md5", b"", usedforsecurity=True)
blake2b(b"")
hmac.digest(b"", b"", "sha256")
"""


def test_hashes_go_on_hosts_in_fips_mode() -> None:
    wrong = ast.parse(f"from hashlib import blake2b{HASHED}")
    assert len(hashes_for_security(wrong)) == len(HASHED.strip().splitlines())
    right = "from hashlib import blake2b\nblake2b(b'', usedforsecurity=False)\nre.new()\nsha256()"
    assert hashes_for_security(ast.parse(right)) == []
    examples = Trees((ROOT / "examples").rglob("*.py"))
    found = {path for path, tree in ChainMap(SOURCES, examples).items() if hashes_for_security(tree)}
    assert found == set(HASHES_OF_SECRETS)


def test_files_of_the_core_and_its_parts_have_names_of_their_own() -> None:
    inner = (path for path in SOURCES if RING_OF[part_of(path)] in ("core", "parts") and "__init__" not in path)
    names = Counter(path.rpartition("/")[2] for path in inner)
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []


def test_no_drawer_for_everything() -> None:
    for path in [*SOURCES, *TESTS]:
        for piece in path.removesuffix(".py").split("/"):
            assert piece not in {"utils", "util", "helpers", "misc", "common"}, path


def sleeps(tree: ast.AST) -> list[str]:
    """Calls that wait for time to pass; giving way to other tasks with asyncio.sleep(0) is none."""
    found = []
    for name, call in calls(tree):
        if name.rpartition(".")[2] not in ("sleep", "usleep", "nanosleep"):
            continue
        gives_way = [ast.unparse(argument) for argument in call.args[:1]] == ["0"]
        if not (name == "asyncio.sleep" and gives_way):
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


def short_bounds(tree: ast.AST) -> list[str]:
    """Calls that wait for something, but not for long; `asyncio.wait` is how a test lets time pass in virtual time."""
    found = []
    for name, call in calls(tree):
        bounds = [keyword.value for keyword in call.keywords if keyword.arg == "timeout" and name != "asyncio.wait"]
        bounds += call.args[:1] if name == "asyncio.timeout" or name.endswith(".result") else []
        bounds += call.args[1:2] if name == "asyncio.wait_for" else []
        least_s = PROCESS_LEAST_S if name == "subprocess.run" else BOUND_LEAST_S
        for bound in bounds:
            if isinstance(bound, ast.Constant) and isinstance(bound.value, int | float) and bound.value < least_s:
                found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


RULES = {
    sleeps: (
        SLEEPING_TESTS,
        "asyncio.sleep(0)\nsleeper()\nsleep",
        "time.sleep(0)\nsleep(1)\nasyncio.sleep(0.1)\nasyncio.sleep(x)\nanyio.sleep(0)\nasyncio.sleep()",
    ),
    short_bounds: (
        SHORT_BOUNDS,
        "asyncio.timeout(60)\nwait_for(x)\nrun(y, timeout=WAIT_S)\nfuture.result()\ngate.wait(0.0)",
        "asyncio.timeout(5)\nasyncio.wait_for(x, 1.0)\nrun(y, timeout=30)\nf.result(10.0)\ng.join(timeout=2)\n"
        "subprocess.run(x, timeout=90)",
    ),
}
"""Forbidden in tests: the files with an exception, harmless lines, and wrong lines."""


@pytest.mark.parametrize("found_in", RULES)
def test_tests_do_not_wait_by_sleeping_and_give_a_slow_host_its_time(found_in: Callable[[ast.AST], list[str]]) -> None:
    exceptions, right, wrong = RULES[found_in]
    assert found_in(ast.parse(right)) == []
    assert len(found_in(ast.parse(wrong))) == len(wrong.splitlines())
    assert {path for path, tree in TESTS.items() if found_in(tree)} == set(exceptions), "or an exception is over"


def test_the_library_waits_for_events_not_for_time() -> None:
    for path in (path for path in SOURCES if part_of(path) not in (*PROGRAMS, "")):
        assert len(sleeps(SOURCES[path])) == (path in LOOKING_AGAIN), path


def test_the_library_leaves_the_hosts_threads_and_lock_alone() -> None:
    """No loop is put to sleep, no thread is bound to a core, and how long threads hold Python's lock is the host's."""
    wrong = "time.sleep(0)\nfrom time import sleep\nos.sched_setaffinity(0, {1})\nsys.setswitchinterval(1)"
    assert meddling(ast.parse(wrong)) == [1, 2, 3, 4]
    assert meddling(ast.parse("asyncio.sleep(1)\ntime.monotonic()\nsleeps")) == []
    for path in (path for path in SOURCES if part_of(path) not in (*PROGRAMS, "")):
        assert meddling(SOURCES[path]) == [], path


MEDDLING = {"sched_setaffinity", "sched_setscheduler", "sched_yield", "setpriority", "setswitchinterval"}


def meddling(tree: ast.AST) -> list[int]:
    """Return the lines that use names outside the library's responsibility."""
    found = set()
    for node in nodes(tree):
        match node:
            case ast.Attribute(value=of, attr=name) if name in MEDDLING or f"{text_of(of)}.{name}" == "time.sleep":
                found.add(node.lineno)
            case ast.ImportFrom(module="time", names=names) if any(one.name == "sleep" for one in names):
                found.add(node.lineno)
    return sorted(found)


def test_tests_are_never_skipped_silently() -> None:
    """A skip needs a reason that a reader of the summary can judge."""
    for path, tree in TESTS.items():
        for name, call in calls(tree):
            if name in ("pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"):
                words = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "reason")]
                assert any(isinstance(word, ast.Constant | ast.JoinedStr) for word in words), f"{path}:{call.lineno}"


def test_what_tests_of_other_engines_import_of_ours_exists() -> None:
    """They run in environments of their own, seldom; a name that has moved shows here."""
    seen = 0
    for path, tree in APART.items():
        for node in nodes(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("kvflow", "tests"):
                missing = {one.name for one in node.names} - defined_by(str(node.module))
                assert not missing, f"{path}:{node.lineno}: {node.module} has no {sorted(missing)}"
                seen += 1
    assert seen > 50


def defined_by(module: str) -> set[str]:
    """Names at the top of one of our modules, and its submodules."""
    at = ROOT.joinpath(*module.split("."))
    file = at / "__init__.py" if at.is_dir() else at.with_suffix(".py")
    found = {one.stem for one in at.iterdir()} if at.is_dir() else set[str]()
    for node in nodes(parsed(file)) if file.exists() else ():
        match node:
            case ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Constant(value=str(name)):
                found.add(name)  # texts are names of `__getattr__`
            case ast.Import(names=names):
                found |= {(one.asname or one.name).split(".")[0] for one in names}
            case _:
                found |= set(_names_bound(node))
    return found


def test_no_logger_is_told_text_from_outside_bare() -> None:
    """One filter of every logger makes texts plain; only kvflow's own templates pass it unchanged."""
    seen = 0
    for path, tree in SOURCES.items():
        if path == "kvflow/logs.py":
            continue
        made = [call for name, call in calls(tree) if name.endswith("getLogger")]
        assert bool(made) == (path in LOGGERS_AS_A_WHOLE), f"{path}: loggers are made by logs.logger_of"
        told = {text_of(parent.value) for parent in nodes(tree) if isinstance(parent, ast.Attribute)}
        for node in (node for node in nodes(tree) if isinstance(node, ast.Assign)):
            for target in map(text_of, node.targets):
                if target in told and target.lower().endswith("logger"):
                    assert ast.unparse(node.value).startswith("logger_of("), f"{path}:{node.lineno}"
        for name, call in calls(tree):
            of, _, verb = name.rpartition(".")
            if verb in LOG_LEVELS and "log" in of.lower().split(".")[-1]:
                template = call.args[verb == "log"]
                assert of == "logger", f"{path}:{call.lineno}: {name}"
                assert isinstance(template, ast.Constant), f"{path}:{call.lineno}: {ast.unparse(template)}"
                seen += 1
    assert seen > 50


# --- a count and its noun


def plurals(tree: ast.AST) -> set[str]:
    """Values before a plural in f-strings and log templates, which say "1 blocks" unless `counted` writes them."""
    said: list[tuple[ast.expr, str]] = []
    for node in nodes(tree):
        if isinstance(node, ast.JoinedStr):
            for value, text in itertools.pairwise(node.values):
                if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant) and not _decimal(value):
                    said.append((value.value, text.value))
    for name, call in calls(tree):
        of, _, verb = name.rpartition(".")
        if of == "logger" and verb in LOG_LEVELS:
            template, *values = call.args[verb == "log" :]
            texts = _PLACE.split(template.value)[1:] if isinstance(template, ast.Constant) else []
            said += zip(values, texts, strict=False)
    return {f"{ast.unparse(value)}{plural}" for value, text in said if (plural := _plural(value, text))}


_PLACE = re.compile(r"%(?:\.\d+)?[a-z]")
_PLURAL = re.compile(r" (?:[a-z-]+ ){0,2}?[A-Za-z]+s\b")
_VERBS = """
belongs does drains fails fits has is leads leaves needs offers overlaps puts reaches says stands takes wants was
accepts as its loads' ms this us whose
"""
_LITTLE = "after and are at bound by cannot for from have hold in nothing of on or read than though to with"
_NO_NOUNS = set(_VERBS.split())
_BETWEEN = _NO_NOUNS | set(_LITTLE.split())


def _plural(value: ast.expr, text: str) -> str:
    """The noun that a text begins with, if it is a plural, and if the value before it is no constant."""
    found = _PLURAL.match(text)
    if not found or text_of(value).rpartition(".")[2].isupper():
        return ""
    *before, last = found[0].split()
    return "" if last in _NO_NOUNS or {*before} & _BETWEEN else found[0]


def _decimal(value: ast.FormattedValue) -> bool:
    """Whether a value is written with decimals, which go with a plural: "1.0 seconds"."""
    return value.format_spec is not None and re.search(r"\.[1-9]f", ast.unparse(value.format_spec)) is not None


PLURALS = """
f"{n} blocks"
f"for {len(ids)} local block ids, {most:,} bytes"
logger.info("%s: %d open leases of %s", name, n, most)
logger.log(level, "%s bytes", n)
"""
NO_PLURALS = """
f"{counted(n, 'block')} of {name!r} is {what}, its {size}: {n} of its blocks"
f"{seconds:.1f} seconds, {GROUPS_MAX} groups, {time_s} ms, {name} has ranks"
logger.info("%s of %s is %s", counted(n, "block"), name, what)
logger.info("nothing")
"""
NO_COUNTS = {
    ("kvflow/doctor/backends.py", "name moves"): "a backend's name and a verb",
    ("kvflow/cli/selftest.py", "report.size_bytes bytes"): "of one block of 128 KiB at least, with separators",
}


def test_texts_count_by_counted() -> None:
    found = [bool(plurals(ast.parse(line))) for line in PLURALS.strip().splitlines()]
    assert found == [True] * 4
    assert len(plurals(ast.parse(PLURALS))) == 5
    assert plurals(ast.parse(NO_PLURALS)) == set()
    assert {(path, said) for path, tree in SOURCES.items() for said in plurals(tree)} == set(NO_COUNTS)


# --- fast and thorough


def marked_thorough(node: ast.AST) -> bool:
    """Whether a test or a class of tests stays out of the fast suite; a marked parameter is its test's own matter."""
    return "pytest.mark.thorough" in map(text_of, getattr(node, "decorator_list", []))


def thorough_of(path: str) -> dict[str, bool]:
    """The tests of a file, those of classes included, and whether each is thorough."""
    found: dict[str, bool] = {}
    for node in TESTS[path].body:
        for test in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
                found[test.name] = marked_thorough(node) or marked_thorough(test)
    return found


def test_what_is_thorough_names_a_fast_sibling() -> None:
    """Its docstring says "Thorough: see `test_x` of this file", or of the file with that path in tests/."""
    seen = 0
    for path, tree in TESTS.items():
        marks = [node for node in tree.body if "pytestmark" in _names_bound(node)]
        assert not [mark for mark in marks if "thorough" in ast.unparse(mark)], path
        for node in (node for node in nodes(tree) if marked_thorough(node)):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            said = re.search(r"Thorough: see `(test_\w+)` of (this file|`([\w/]+\.py)`)", ast.get_docstring(node) or "")
            assert said is not None, f"{path}: {node.name}"
            sibling_path = f"tests/{said[3]}" if said[3] else path
            assert thorough_of(sibling_path).get(said[1]) is False, f"{path}: {node.name}: {said[1]} is no fast test"
            seen += 1
    assert seen


def test_tests_that_start_processes_go_to_workers_file_by_file(request: pytest.FixtureRequest) -> None:
    """Else each worker starts what a module shares, such as a service with its model, for itself."""
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    group = functools.partial(conftest._ByFile._split_scope, None)
    assert group("tests/cli/test_keys.py::one") == group("tests/cli/test_keys.py::two")
    assert group("tests/core/test_x.py::one") != group("tests/core/test_x.py::two")


@pytest.mark.thorough
def test_tests_that_start_processes_share_a_worker_file_by_file() -> None:
    """xdist asks for the groups.

    Thorough: see `test_tests_that_start_processes_go_to_workers_file_by_file` of this file.
    """
    file = "tests/cli/test_keys.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "-v", file]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    workers = re.findall(rf"\[(gw\d)\].*{file}::", done.stdout)
    assert len(workers) > 1, done.stdout
    assert len(set(workers)) == 1, done.stdout
