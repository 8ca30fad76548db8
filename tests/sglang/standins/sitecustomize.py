"""On the path of SGLang's processes in tests: modules of others that SGLang asks for and only CUDA has are empty.

SGLang's own modules, and what other packages import, are never touched. With SGLANG_USE_CPU_ENGINE and no AMX every
layer takes its `forward_native`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
_ABSENT = ("torchcodec",)  # whose absence SGLang handles by itself
missing: list[str] = []


class Anything(type):
    """A class with any attribute; called, an instance that can be called, or decorates."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


def anything(name: str) -> Any:
    def call(self: Any, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)()

    body = {"__init__": lambda self, *_, **__: None, "__call__": call, "__getattr__": attribute}
    return Anything(name, (), body)


class StandIn(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: for modules of SGLang that no other finder has found."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top == "sglang" or top in sys.stdlib_module_names or top in _ABSENT:
            return None
        if ("." in name and top not in missing) or not asked_by_sglang():
            return None
        if top not in missing:
            missing.append(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def asked_by_sglang() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "importlib" not in file and file != __file__:
            return f"{os.sep}site-packages{os.sep}sglang{os.sep}" in file
        frame = frame.f_back
    return False


sys.meta_path.append(Finder())
