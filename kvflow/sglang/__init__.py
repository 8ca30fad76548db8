"""kvflow for SGLang: a transfer backend by the name "kvflow", registered by SGLang's own plugin hooks.

An installed kvflow is a plugin of SGLang's: it finds `register` by the entry point `sglang.srt.plugins` and calls it in
each of its processes, before arguments are parsed. Heavy modules are imported when a server asks for a class of ours.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

__all__ = ["NAME", "register"]

NAME = "kvflow"
_UTILS = "sglang.srt.disaggregation.utils"


def register() -> None:
    """Tell SGLang of the backend: one more choice of `--disaggregation-transfer-backend`, and its classes."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    known = {member.name: member.value for member in utils.TransferBackend}
    if NAME in known.values():
        return
    backends = enum.Enum("TransferBackend", known | {NAME.upper(): NAME})  # type: ignore[misc]
    add_disagg_transfer_backend_choices([NAME])
    HookRegistry.register(f"{_UTILS}.TransferBackend", backends, HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _class_of, HookType.AROUND)


def _class_of(original: Callable[..., Any], backend: enum.Enum, kind: enum.Enum) -> Any:
    """Wrapper of SGLang's `get_kv_class`."""
    if backend.value != NAME or kind.value == "kvargs":
        return original(backend, kind)
    from kvflow.sglang.bootstrap import KVFlowBootstrapServer
    from kvflow.sglang.manager import KVFlowManager
    from kvflow.sglang.receiver import KVFlowReceiver
    from kvflow.sglang.sender import KVFlowSender

    return {
        "manager": KVFlowManager,
        "sender": KVFlowSender,
        "receiver": KVFlowReceiver,
        "bootstrap_server": KVFlowBootstrapServer,
    }[kind.value]
