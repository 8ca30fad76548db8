"""The listen addresses of vLLM's workers under Ray, and the errors if Ray has changed."""

from __future__ import annotations

from typing import Any

import pytest
from tests_support import each

from kvflow import Config
from kvflow.errors import ConfigError
from kvflow.ray import llm


@each(
    ("given", "workers", "expected"),
    [
        ({}, 1, {"listen": "tcp://10.0.0.7:0"}),
        ({"lease_ttl_s": 9.0}, 1, {"lease_ttl_s": 9.0, "listen": "tcp://10.0.0.7:0"}),
        # Workers may be on nodes whose addresses their replica does not know.
        ({}, 2, {"listen": "tcp://0.0.0.0:0", "advertise_host": "auto:10.0.0.1"}),
        ({"advertise_host": "auto"}, 2, {"listen": "tcp://0.0.0.0:0", "advertise_host": "auto"}),
        ({"listen": "tcp://10.1.0.7:0"}, 4, {"listen": "tcp://10.1.0.7:0"}),
    ],
)
def test_workers_listen_where_their_node_is_reached(
    given: dict[str, Any], workers: int, expected: dict[str, Any]
) -> None:
    found = llm.worker_settings(given, node_ip="10.0.0.7", head="10.0.0.1", workers=workers)
    assert found == expected
    Config(engine_id="legal", **found)


def test_addresses_of_version_6_keep_brackets() -> None:
    found = llm.worker_settings({}, node_ip="fd00::7", head="fd00::1", workers=2)
    assert found == {"listen": "tcp://[::]:0", "advertise_host": "auto:fd00::1"}
    assert Config(engine_id="legal", **found).advertise_toward == "fd00::1"
    assert llm.worker_settings({}, node_ip="fd00::7", head="", workers=1) == {"listen": "tcp://[fd00::7]:0"}


def test_without_rays_internals_it_says_what_it_is_written_for() -> None:
    with pytest.raises(ConfigError, match=r"Ray Serve LLM: .*written for ray 2\.60"):
        llm._ray_internal("nowhere", "Nobody", ())
