"""Permits of a bounded thing, and the order at one server: the rules of `core.policy.queue` as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.core.policy.queue import Amount, FairQueue, Permit, PermitState, ShortestFirst
from tests.support.budgets import machine_test

LIMITS, PEER_LIMITS = (20, 6), (10, 3)
PEERS = ("a", "b", "c")


def is_free(room: list[Permit], amount: Amount, limits: Amount) -> bool:
    """The rule of the docs, by counting: it fits, or it is alone."""
    return not room or all(
        sum(permit.amount[index] for permit in room) + amount[index] <= limit for index, limit in enumerate(limits)
    )


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of requests and ends. After each step the books balance, and every waiter has a reason to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(LIMITS, PEER_LIMITS)
        self.asked: list[Permit] = []
        self.waited: list[Permit] = []
        self.granted: list[Permit] = []

    def of(self, state: PermitState, peer: str | None = None) -> list[Permit]:
        return [permit for permit in self.asked if permit.state is state and peer in (None, permit.peer)]

    @rule(
        peer=st.sampled_from(PEERS),
        amount=st.tuples(st.integers(0, 25), st.integers(1, 4)),
        priority=st.integers(-1, 1),
    )
    def ask(self, peer: str, amount: Amount, priority: int) -> None:
        permit = self.queue.request_permit(amount, peer, priority)
        self.asked.append(permit)
        if permit.state is PermitState.WAITING:
            self.waited.append(permit)
            permit.on_grant = lambda: self.granted.append(permit)

    @precondition(lambda self: self.of(PermitState.WAITING) or self.of(PermitState.UNDER_WAY))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        open_permits = self.of(PermitState.WAITING) + self.of(PermitState.UNDER_WAY)
        permit = data.draw(st.sampled_from(open_permits))
        before = {id(other) for other in self.of(PermitState.UNDER_WAY)}
        granted = self.queue.end(permit)
        assert [id(other) for other in self.of(PermitState.UNDER_WAY) if id(other) not in before] == sorted(
            (id(other) for other in granted), key=[id(other) for other in self.asked].index
        ), "exactly those that it names have begun"

    @invariant()
    def whoever_has_waited_and_may_go_was_told_once(self) -> None:
        """Also if another turn's request let it go."""
        gone = [permit for permit in self.waited if permit.state is PermitState.UNDER_WAY]
        assert set(map(id, gone)) <= set(map(id, self.granted))
        assert len(set(map(id, self.granted))) == len(self.granted)

    @invariant()
    def what_is_under_way_is_what_was_granted_and_not_given_back(self) -> None:
        under_way = self.of(PermitState.UNDER_WAY)
        assert self.queue.used == tuple(sum(permit.amount[index] for permit in under_way) for index in range(2))
        assert self.queue.waiting == len(self.of(PermitState.WAITING))
        known = {peer: (used, waiting) for peer, used, waiting in self.queue.peers()}
        for peer in PEERS:
            ours, waiting = self.of(PermitState.UNDER_WAY, peer), len(self.of(PermitState.WAITING, peer))
            used = tuple(sum(permit.amount[index] for permit in ours) for index in range(2))
            assert known.get(peer) == ((used, waiting) if ours or waiting else None), "an idle peer is forgotten"

    @invariant()
    def limits_hold_unless_a_turn_is_alone(self) -> None:
        for limits, peers in ((LIMITS, (None,)), (PEER_LIMITS, PEERS)):
            for peer in peers:
                under_way = self.of(PermitState.UNDER_WAY, peer)
                assert len(under_way) <= 1 or is_free(under_way, (0, 0), limits)

    @invariant()
    def whoever_waits_has_a_reason(self) -> None:
        """Each peer's first turn is stopped by the peer's limits, or the first of the others by the limits for all."""
        under_way = self.of(PermitState.UNDER_WAY)
        able = []
        for peer in PEERS:
            waiting = sorted(
                self.of(PermitState.WAITING, peer), key=lambda permit: (permit.priority, self.asked.index(permit))
            )
            if waiting and is_free(self.of(PermitState.UNDER_WAY, peer), waiting[0].amount, PEER_LIMITS):
                able.append(waiting[0])
        if able:
            first = min(able, key=lambda permit: (permit.priority, self.asked.index(permit)))
            assert not is_free(under_way, first.amount, LIMITS)

    def teardown(self) -> None:
        """When everything under way ends, every waiter gets a permit."""
        while under_way := self.of(PermitState.UNDER_WAY):
            self.queue.end(under_way[0])
        assert not self.of(PermitState.WAITING), "somebody was left waiting"
        assert (self.queue.used, self.queue.waiting, list(self.queue.peers())) == ((0, 0), 0, [])


TestQueue = machine_test(QueueMachine, 25, 100, steps=50)


def test_a_large_turn_is_not_starved_by_small_ones_that_would_fit() -> None:
    queue = FairQueue((10,), (10,))
    holder = queue.request_permit((6,), "a", 0)
    large = queue.request_permit((8,), "b", 0)
    small = queue.request_permit((1,), "c", 0)
    assert (large.state, small.state) == (PermitState.WAITING, PermitState.WAITING)
    assert queue.end(holder) == [large, small]


def test_asking_may_let_somebody_else_go_who_is_told() -> None:
    """The newcomer uses its peer's share, so the peer's next turn no longer keeps the third waiting."""
    queue = FairQueue((4,), (3,))
    holder = queue.request_permit((2,), "a")
    large, behind = queue.request_permit((3,), "c", 1), queue.request_permit((1,), "b", 1)
    told: list[Permit] = []
    behind.on_grant = lambda: told.append(behind)
    newcomer = queue.request_permit((1,), "c", 0)
    assert (holder.state, newcomer.state, behind.state) == (PermitState.UNDER_WAY,) * 3
    assert (large.state, told) == (PermitState.WAITING, [behind])


def test_a_withdrawn_turn_gives_its_place_up() -> None:
    queue = FairQueue((10,), (10,))
    queue.request_permit((6,), "a", 0)
    large, small = queue.request_permit((8,), "a", 0), queue.request_permit((1,), "a", 0)
    assert queue.end(large) == [small]
    with pytest.raises(AssertionError, match="given back once"):
        queue.end(large)


def test_behind_a_withdrawn_turn_the_most_urgent_goes() -> None:
    queue = FairQueue((1,), (1,))
    holder, first, last, urgent = (queue.request_permit((1,), "a", priority) for priority in (0, 0, 5, 1))
    assert queue.end(first) == []
    assert queue.end(holder) == [urgent]
    assert queue.end(urgent) == [last]


# --- one server


def test_the_smallest_goes_first_and_equal_ones_in_order() -> None:
    queue: ShortestFirst[str] = ShortestFirst(0)
    for name, size in (("first", 8), ("second", 8), ("small", 1)):
        queue.add(name, size)
    assert [queue.pop() for _ in range(3)] == ["small", "first", "second"]


def test_the_oldest_is_passed_by_no_more_than_its_own_size() -> None:
    queue: ShortestFirst[str] = ShortestFirst(1)
    queue.add("large", 8)
    order = []
    for index in range(8):  # small ones without end
        queue.add(f"small {index}", 2)
        order.append(queue.pop())
    assert order == ["small 0", "small 1", "small 2", "large", "small 3", "small 4", "small 5", "small 6"]


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30), data=st.data())
def test_one_server_serves_each_thing_once_and_passes_nobody_for_long(sizes: list[int], data: st.DataObject) -> None:
    start_size = 3
    queue: ShortestFirst[int] = ShortestFirst(start_size)
    costs = [size + start_size for size in sizes]
    came = served = 0
    waiting: list[int] = []
    passed = dict.fromkeys(range(len(sizes)), 0)
    while served < len(sizes):
        if came < len(sizes) and (not waiting or data.draw(st.booleans())):
            queue.add(came, sizes[came])
            waiting.append(came)
            came += 1
            continue
        item = queue.pop()
        oldest = waiting[0]
        waiting.remove(item)
        served += 1
        if item != oldest:
            assert costs[item] <= min((costs[other] for other in waiting), default=costs[item])
            passed[oldest] += costs[item]
            assert passed[oldest] < costs[oldest] + costs[item]
        assert len(queue) == len(waiting)


def deliver(queue: FairQueue, count: int, took_s: float, peer: str = "p") -> None:
    """Deliver `count` permits of 10, two at a time. Each takes `took_s`."""
    under_way = [queue.request_permit((10, 1), peer) for _ in range(2)]
    for _ in range(count):
        queue.end(under_way.pop(0), took_s)
        under_way.append(queue.request_permit((10, 1), peer))
    for permit in under_way:
        queue.end(permit, took_s)


def room_of(queue: FairQueue, peer: str = "p") -> int:
    """How many permits of 10 may be under way."""
    permits = [queue.request_permit((10, 1), peer) for _ in range(99)]
    count = sum(permit.state is PermitState.UNDER_WAY for permit in permits)
    for permit in permits:
        queue.end(permit)
    return count


def test_a_fast_peer_gets_as_much_room_as_it_delivers_in_time() -> None:
    queue = FairQueue((1000, 99), (20, 99), ahead_s=0.5)
    deliver(queue, 9, 0.1)  # 20 per 0.1 s: 100 in the time ahead
    assert room_of(queue) == 10
    assert room_of(queue, "other") == 2
    deliver(queue, 9, 10.0)
    assert room_of(queue) == 8, "one that shows less has perhaps waited for others"
    deliver(queue, 200, 10.0)
    assert room_of(queue) == 2, "never less than the limit"
    fixed = FairQueue((1000, 99), (20, 99))
    deliver(fixed, 9, 0.1)
    assert room_of(fixed) == 2, "who has chosen a limit has chosen it"


def test_a_small_read_that_overtakes_shows_no_speed() -> None:
    queue = FairQueue((1000, 99), (20, 99), ahead_s=0.5)
    large = queue.request_permit((20, 1), "p")
    for _ in range(9):
        queue.end(queue.request_permit((0, 1), "p"), 1e-6)
    queue.end(large, 1.0)
    assert room_of(queue) == 2


def test_what_is_remembered_of_fast_peers_is_bounded() -> None:
    queue = FairQueue((1000, 99), (20, 99), ahead_s=0.5)
    for at in range(1100):
        deliver(queue, 2, 0.1, f"p{at}")
    assert room_of(queue, "p0") == 2
    assert room_of(queue, "p1099") > 2
