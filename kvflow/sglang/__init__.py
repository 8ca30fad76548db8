"""kvflow's transfer backend for SGLang, named "kvflow", which registers itself through SGLang's plugin hooks.

If kvflow is installed as a package, SGLang finds `register` by the entry point `sglang.srt.plugins` and calls it in
each process, before it parses arguments. Heavy modules are imported only when a server asks for a class of this
backend. With the environment variable `KVFLOW_AS_NIXL=1` kvflow also is the backend "nixl", in place of SGLang's.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import Any

from kvflow.checks import error_text
from kvflow.connector.as_nixl import acts_as_nixl
from kvflow.errors import ConfigError
from kvflow.logs import logger_of
from kvflow.sglang.names import NAME, NIXL

__all__ = ["NAME", "NIXL", "register"]

_UTILS = "sglang.srt.disaggregation.utils"
logger = logger_of(__name__)


def register() -> None:
    """Make "kvflow" a choice of SGLang's `--disaggregation-transfer-backend`, with kvflow's classes.

    Raises:
        SystemExit: the command line asks for the backend, but SGLang's own modules cannot be imported. Without this
            error SGLang would only say that the choice is invalid. Or `KVFLOW_AS_NIXL` is invalid: SGLang logs other
            exceptions of plugins, and goes on with a backend that is not kvflow.
    """
    try:
        acts_as_nixl()
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    try:
        from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
        from sglang.srt.disaggregation import utils
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except Exception as error:  # noqa: BLE001 - errors of SGLang's own modules, and of everything that they import
        _explain(error)
        return
    known = {member.name: member.value for member in utils.TransferBackend}
    if NAME in known.values():
        return
    backends = enum.Enum("TransferBackend", known | {NAME.upper(): NAME})  # type: ignore[misc]
    add_disagg_transfer_backend_choices([NAME])
    HookRegistry.register(f"{_UTILS}.TransferBackend", backends, HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _class_of, HookType.AROUND)


def _explain(error: Exception) -> None:
    """Log that SGLang's own modules raised `error`, so that the backend is not available.

    If the command line asks for the backend, raise SystemExit instead.
    """
    why = (
        f"kvflow is no transfer backend here: SGLang's own modules cannot be imported ({type(error).__name__}: "
        f"{error_text(error)}). They need what SGLang installs for CUDA, such as torchvision and sgl_kernel: install "
        "SGLang with its dependencies, on a machine with CUDA, and try "
        "`python -c 'import sglang.srt.disaggregation.utils'`"
    )
    if any(argument.split("=")[-1] in _names() for argument in sys.argv[1:]):
        raise SystemExit(why)
    logger.warning("%s", why)


def _names() -> tuple[str, ...]:
    """Return the names of backends that are kvflow."""
    return (NAME, NIXL) if acts_as_nixl() else (NAME,)


def _class_of(original: Callable[..., Any], backend: enum.Enum, kind: enum.Enum) -> Any:
    """Return kvflow's class of `kind` (manager, sender, ...) if `backend` is kvflow, else SGLang's class.

    SGLang calls this function in place of its own `get_kv_class`, which is `original`. For the kind `kvargs` the class
    is always SGLang's.
    """
    if backend.value not in _names() or kind.value == "kvargs":
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
