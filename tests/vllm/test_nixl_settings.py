"""The switch `KVFLOW_AS_NIXL`: what vLLM makes by the name NixlConnector, and what NixlConnector's settings become."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvflow.vllm
from kvflow.errors import ConfigError
from kvflow.vllm.connector import KVFlowConnector
from kvflow.vllm.extra_config import config_of, extra_of, warn_of_side_channel
from kvflow.vllm.named_nixl import NixlConnector
from kvflow.vllm.nixl_settings import NIXL_NAMES, switch_warning
from tests.vllm.test_settings import vllm_config

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
LATER = "NixlPushConnector"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a registry of connectors, and none of NixlConnector's variables."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    for name in (HOST, PORT, "KVFLOW_AS_NIXL"):
        monkeypatch.delenv(name, raising=False)


def named(name: str = "NixlConnector", module: str | None = None, role: str = "kv_both", **extra: Any) -> Any:
    config = vllm_config(role, **extra)
    config.kv_transfer_config.kv_connector, config.kv_transfer_config.kv_connector_module_path = name, module
    return config


def made_by_name(name: str) -> type[Any]:
    """As vLLM finds it where a launcher gives only a name."""
    kvflow.vllm.register()
    return KVConnectorFactory.get_connector_class(KVTransferConfig(kv_connector=name, kv_role="kv_both"))


def settings(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str] | None = None, **extra: Any) -> Any:
    """Kvflow's Config of the first rank, with the switch on."""
    for name, value in {"KVFLOW_AS_NIXL": "1", **(variables or {})}.items():
        monkeypatch.setenv(name, value)
    return config_of(named(**extra), tp_rank=0, pp_rank=0)


@pytest.mark.parametrize("name", NIXL_NAMES)
def test_with_the_switch_the_name_is_kvflow(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stock = made_by_name(name)
    assert issubclass(stock, nixl.NixlBaseConnector)
    monkeypatch.setenv("KVFLOW_AS_NIXL", "1")
    for _ in range(2):  # vLLM may load plugins more than once
        assert made_by_name(name) is NixlConnector
    assert NixlConnector.__name__ == "NixlConnector"
    assert KVConnectorFactory.get_connector_class_by_name(NixlConnector.__name__) is NixlConnector
    assert made_by_name("KVFlowConnector") is KVFlowConnector
    assert issubclass(made_by_name(LATER), nixl.NixlBaseConnector)


@pytest.mark.parametrize("value", ["", "0", None])
def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv("KVFLOW_AS_NIXL", value)
    assert made_by_name("NixlConnector") is nixl.NixlConnector


@pytest.mark.parametrize("value", ["yes", "true", "2", " 1"])
def test_another_value_prevents_the_start(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Of every vLLM: with "yes" its user would believe that the engine has kvflow."""
    monkeypatch.setenv("KVFLOW_AS_NIXL", value)
    with pytest.raises(ConfigError, match=f"KVFLOW_AS_NIXL: expected 1 .* or 0 .*, got '{value}'"):
        kvflow.vllm.register()


def test_a_name_alone_speaks_the_stock_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet with a closed list of names may have engines with vLLM's own connector."""
    config = settings(monkeypatch)
    assert extra_of(named()).stock_peers
    assert (config.listen, config.lease_ttl_s) == ("tcp://127.0.0.1:0", 120.0)
    assert not extra_of(named(stock_peers=False)).stock_peers
    assert not extra_of(named("KVFlowConnector")).stock_peers
    assert not extra_of(named(module="kvflow.vllm.named_nixl")).stock_peers


@pytest.mark.parametrize(
    ("variables", "listen"),
    [
        ({HOST: "10.0.0.7", PORT: "5700"}, "tcp://10.0.0.7:5700"),
        ({HOST: "10.0.0.7"}, "tcp://10.0.0.7:5600"),
        ({PORT: "5700"}, "tcp://127.0.0.1:5700"),
        ({HOST: "fd00::7", PORT: "5700"}, "tcp://[fd00::7]:5700"),
        ({HOST: "0.0.0.0", PORT: "5700"}, "tcp://0.0.0.0:5700"),
        ({HOST: ""}, "tcp://127.0.0.1:0"),
    ],
)
def test_it_listens_where_the_variables_say(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variables: dict[str, str], listen: str
) -> None:
    config = settings(monkeypatch, variables)
    assert config.listen == listen
    assert config.advertise_host == (None if listen.endswith(":0") else "auto")
    warn_of_side_channel(named())
    assert not caplog.records
    assert settings(monkeypatch, variables, listen="tcp://10.0.0.9:1").listen == "tcp://10.0.0.9:1"


def test_a_replica_has_the_port_that_nixl_connector_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLOW_AS_NIXL", "1")
    monkeypatch.setenv(PORT, "5700")
    given = named()
    given.parallel_config.tensor_parallel_size = given.parallel_config.pipeline_parallel_size = 1
    given.parallel_config.data_parallel_index = 3
    assert config_of(given, tp_rank=0, pp_rank=0).listen_port == 5703


def test_keys_of_nixl_connector_mean_what_they_mean_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(monkeypatch, backends=["UCX", "LIBFABRIC"], kv_lease_duration=45, enforce_handshake_compat=True)
    assert (config.nixl_backend, config.lease_ttl_s) == ("UCX,LIBFABRIC", 45.0)
    given = named(kv_lease_duration=45, stock={"router_s": 3})
    assert (extra_of(given).stock.lease_s, extra_of(given).stock.router_s) == (45.0, 3.0)
    assert extra_of(named(kv_lease_duration=45, stock={"lease_s": 20})).stock.lease_s == 20.0
    assert settings(monkeypatch, kv_lease_duration=45, lease_ttl_s=60).lease_ttl_s == 60.0


def test_it_sleeps_with_the_backends_with_which_nixl_connector_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLOW_AS_NIXL", "1")
    for backends, sleeps in ((["UCX"], True), (["LIBFABRIC"], False), (["UCX", "LIBFABRIC"], False)):
        given = KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config={"backends": backends}
        )
        assert NixlConnector.supports_sleep_mode(given) is sleeps


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"enforce_handshake_compat": False}, "enforce_handshake_compat is False, supported is True.*`stock`"),
        ({"backends": "UCX"}, "backends: expected a list of NIXL's backends, got 'UCX'"),
        ({"backends": []}, "backends: expected a list"),
        ({"backends": [7]}, "backends: expected .*7"),
        ({"kv_lease_duration": "30"}, "kv_lease_duration: .*'30'"),
        ({"kv_lease_duration": 0}, "kv_lease_duration: .*0"),
        ({"kv_lease_durations": 30}, "kv_lease_durations"),
    ],
)
def test_what_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config: .*{message}|{message}.*kv_connector_extra_c"):
        settings(monkeypatch, **extra)


def test_an_address_that_is_none_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"{HOST}, {PORT}: expected 'tcp://host:port'"):
        settings(monkeypatch, {HOST: "10.0.0.7:5600"})


def test_one_line_says_it_with_what_has_no_effect() -> None:
    given = {"num_threads": 8, "engine_ttl": 60.0, "kv_lease_duration": 45}
    line = switch_warning(given, {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480"})
    assert line.startswith("KVFLOW_AS_NIXL=1: NixlConnector is kvflow's connector in this engine. It exchanges blocks")
    assert line.endswith("Without effect: num_threads, engine_ttl, VLLM_NIXL_ABORT_REQUEST_TIMEOUT")
    alone = switch_warning({"stock_peers": False}, {})
    assert "It exchanges nothing with engines that have vLLM's own" in alone
    assert "Without effect" not in alone
    assert "\n" not in line + alone


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_line_comes_once_for_each_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: KVConnectorRole, switch: str
) -> None:
    """In the scheduler's connector object alone; and before an error, so that a reader of the log knows its cause."""
    monkeypatch.setenv("KVFLOW_AS_NIXL", switch)
    given = named(typo=1)
    monkeypatch.setattr("kvflow.vllm.connector.groups_of", lambda *_: [])
    monkeypatch.setattr("kvflow.vllm.connector.KVConnectorBase_V1.__init__", lambda *_: None)
    with pytest.raises(ConfigError, match="typo"):
        NixlConnector(given, role, None)  # type: ignore[arg-type]
    lines = [one for one in caplog.records if "KVFLOW_AS_NIXL=1" in one.getMessage()]
    assert len(lines) == (role is KVConnectorRole.SCHEDULER and switch == "1")
