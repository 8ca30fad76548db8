"""The example server on Ray without Ray: which replica gets a request, and what service.yaml says."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray_server.ranking import ranked
from tiny_model import EXAMPLES

from kvflow.ray.replica import ReplicaPlace

NAMES = st.sampled_from(["a", "b", "c", "d"])
BLOCKS_FREE = st.dictionaries(NAMES, st.integers(0, 100), max_size=4)


@given(
    st.dictionaries(NAMES, st.integers(0, 100), max_size=4),
    st.integers(0, 2000),
    st.text(max_size=3),
    st.frozensets(NAMES),
)
def test_everybody_is_asked_once_and_who_has_failed_last(
    candidates: dict[str, int], tokens: int, prefix: str, avoid: frozenset[str]
) -> None:
    ranks = ranked(candidates, tokens=tokens, prefix=prefix, avoid=avoid)
    names = [name for rank in ranks for name in rank]
    assert sorted(names) == sorted(candidates)
    assert all(ranks), "Serve takes no empty rank"
    failed = [name in avoid for name in names]
    assert failed == sorted(failed)


def test_without_a_prefix_the_freest_is_first() -> None:
    free = {"a": 3, "b": 9, "c": 5}
    assert ranked(free, tokens=16) == [["b"], ["c"], ["a"]]
    assert ranked(free, tokens=16, avoid="b") == [["c"], ["a"], ["b"]]


def test_a_prefix_has_a_replica_of_its_own_while_that_has_room() -> None:
    names = "abc"
    even = dict.fromkeys(names, 10)
    homes = {prefix: ranked(even, tokens=16, prefix=prefix)[0][0] for prefix in map(str, range(20))}
    assert set(homes.values()) == set(names), "prefixes are spread"
    for prefix, home in homes.items():
        fewer = {name: even[name] for name in {home, "a"}}
        assert ranked(fewer, tokens=16, prefix=prefix)[0] == [home], "whoever else comes or goes"
        for blocks, tokens, first in ((5, 16, True), (4, 16, False), (9, 160, False)):
            now = {name: blocks if name == home else 10 for name in names}
            assert (ranked(now, tokens=tokens, prefix=prefix)[0] == [home]) is first


def test_what_service_yaml_says_goes_together() -> None:
    """Time to drain, and files that are there."""
    (app,) = yaml.safe_load((EXAMPLES / "ray_server/service.yaml").read_text())["applications"]
    module, _, function = app["import_path"].partition(":")
    assert f"def {function}(" in (EXAMPLES / f"{module.replace('.', '/')}.py").read_text()
    prefill, decode, ingress = app["deployments"]
    assert [one["name"] for one in (prefill, decode, ingress)] == ["Prefill", "Decode", "Ingress"]
    for deployment in (prefill, decode):
        place = ReplicaPlace(
            app=app["name"],
            deployment=deployment["name"],
            unique_id="x",
            node_ip="10.0.0.7",
            shutdown_timeout_s=deployment["graceful_shutdown_timeout_s"],
            wait_loop_s=deployment["graceful_shutdown_wait_loop_s"],
        )
        deadline_s = place.drain_deadline_s(place.config({}))
        assert deadline_s >= app["args"]["deadline_s"], "a lease lives as long as its request may take"
