"""Config.transport by name. A process imports the transport that it uses, and no other."""

from __future__ import annotations

from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.transport.base import Transport


def make_transport(config: Config, agent_name: str) -> Transport:
    """The transport that `config` names, not opened yet; ConfigError for an unknown name."""
    match config.transport:
        case "nixl":
            from kvflow.transport.nixl.loop import NixlTransport

            return NixlTransport(config, agent_name)
        case "inproc":
            from kvflow.transport.inproc import InprocTransport

            return InprocTransport(agent_name)
        case unknown:
            raise ConfigError(f"transport: expected 'nixl' or 'inproc', got {unknown[:80]!r}")
