"""Config.transport by name. Imports of a transport's dependencies happen when it is opened, not here."""

from __future__ import annotations

from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.transport.base import Transport
from kvflow.transport.inproc import InprocTransport
from kvflow.transport.nixl.agents import NixlSettings
from kvflow.transport.nixl.loop import NixlTransport


def make_transport(config: Config, agent_name: str) -> Transport:
    """The transport that `config` names, not opened yet; ConfigError for an unknown name."""
    match config.transport:
        case "nixl":
            return NixlTransport(
                NixlSettings(
                    agent_name=agent_name,
                    backend=config.nixl_backend,
                    backend_params=config.nixl_backend_params,
                    notification_poll_interval_s=config.limits.notification_poll_interval_s,
                    prefault=config.prefault,
                )
            )
        case "inproc":
            return InprocTransport(agent_name)
        case unknown:
            raise ConfigError(f"transport: expected 'nixl' or 'inproc', got {unknown[:80]!r}")
