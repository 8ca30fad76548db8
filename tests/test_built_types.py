"""The decoders and encoders of kvflow's types are built when kvflow is imported, on one thread."""

from __future__ import annotations

import ast
import gc
import threading

from kvflow import checks
from tests.test_house import SOURCES, calls, nodes, run_python

NEVER_DECODED = {
    "kvflow.connector.step": "an engine's own channel carries steps; kvflow only makes them",
    "kvflow.core.protocol.prompts": "marks are within a step",
    "kvflow.core.protocol.messages.ReaderRequest": "what requests have in common",
    "kvflow.core.protocol.messages.PartReply": "what replies of parts have in common",
}
NEED_AN_ENGINE = ("kvflow.ray", "kvflow.sglang", "kvflow.vllm")
_BUILDERS = {"built", "requests_with", "replies_with"}
"""The second is called when a runtime opens, the third at import: what their types need is built before, or then."""

UNBUILT = f"""
import gc, importlib, pkgutil
import kvflow, msgspec

def below(kind):
    for sub in kind.__subclasses__():
        yield sub
        yield from below(sub)

for module in pkgutil.walk_packages(kvflow.__path__, "kvflow."):
    try:
        importlib.import_module(module.name)
    except ImportError:
        assert module.name.startswith({NEED_AN_ENGINE}), module.name
for struct in below(msgspec.Struct):
    built = any(type(found).__name__ == "StructInfo" for found in gc.get_referents(struct))
    if struct.__module__.startswith("kvflow") and not built:
        print(struct.__module__, struct.__name__, sep=".")
"""


def test_importing_a_module_builds_its_structs() -> None:
    unbuilt = run_python(UNBUILT).split()
    assert "kvflow.connector.step.Step" in unbuilt, "the test sees which are not"
    assert [name for name in unbuilt if not name.startswith(tuple(NEVER_DECODED))] == []


def test_every_type_is_decoded_by_a_decoder_of_its_module() -> None:
    """`decode(..., type=...)` builds its decoder at the call, and for a union at every call."""
    seen = 0
    for path, tree in SOURCES.items():
        functions = [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {call for one in functions if one.name not in _BUILDERS for call in ast.walk(one)}
        for name, call in calls(tree):
            assert not (name.endswith("decode") and {"type"} & {given.arg for given in call.keywords}), path
            if name.endswith("Decoder"):
                seen += 1
                assert call not in inside, f"{path}:{call.lineno}"
    assert seen > 15


def test_a_checked_type_is_built_before_another_thread_sees_it() -> None:
    """`checks.checked` makes its struct at the first use, which may be on any thread."""
    made: list[object] = []
    thread = threading.Thread(target=lambda: made.append(checks._struct_with(tuple[int, bytes])))
    thread.start()
    thread.join()
    assert any(type(found).__name__ == "StructInfo" for found in gc.get_referents(made[0]))
