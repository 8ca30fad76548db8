"""The switch `KVFLOW_AS_NIXL`: kvflow takes the name of an engine's own NIXL connector.

Launchers and routers that only know the connectors in a list of their own then start kvflow as "NixlConnector" in vLLM,
and as "nixl" in SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvflow.checks import short_repr
from kvflow.errors import ConfigError

AS_NIXL = "KVFLOW_AS_NIXL"


def acts_as_nixl(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the switch is on: the variable `KVFLOW_AS_NIXL` in `environment` is "1".

    ConfigError if it is anything but "1", "0", empty or unset.
    """
    value = environment.get(AS_NIXL, "")
    if value not in ("1", "0", ""):
        raise ConfigError(f"{AS_NIXL}: expected 1 (on) or 0 (off), got {short_repr(value)}")
    return value == "1"
