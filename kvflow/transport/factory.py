"""Config.transport by name. Imports of a transport's dependencies happen when it is opened, not here."""

from __future__ import annotations

from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.transport.base import Transport
from kvflow.transport.inproc import InprocTransport
from kvflow.transport.nixl.loop import NixlTransport


def make_transport(config: Config, agent_name: str) -> Transport:
    """The transport that `config` names, not opened yet; ConfigError for an unknown name."""
    match config.transport:
        case "nixl":
            return NixlTransport(config, agent_name)
        case "inproc":
            return InprocTransport(agent_name)
        case unknown:
            raise ConfigError(f"transport: expected 'nixl' or 'inproc', got {unknown[:80]!r}")
