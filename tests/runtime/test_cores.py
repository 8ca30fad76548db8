"""Threads that have much to do at the same time are on different cores (docs/decisions/0031)."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import pytest
from tests_support import WAIT_S, until

from kvflow.device import cores
from kvflow.device.helper import Helper
from kvflow.runtime.memory.copy_thread import CopyThread

T = TypeVar("T")
ALL = os.sched_getaffinity(0)
several_cores = pytest.mark.skipif(len(ALL) < 2, reason="needs two cores")


class Enlisted:
    """A thread that is enlisted and calls what it is given."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.do(lambda: None)

    @property
    def cores(self) -> set[int]:
        """Where it may run."""
        assert self._thread.native_id is not None
        return os.sched_getaffinity(self._thread.native_id)

    def do(self, call: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self._calls.put(lambda: done.set_result(call()))
        return done.result(WAIT_S)

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        cores.enlist()
        while (call := self._calls.get()) is not None:
            call()


@pytest.fixture
def threads() -> Iterator[tuple[Enlisted, Enlisted]]:
    made = Enlisted(), Enlisted()
    yield made
    for one in made:
        one.do(cores.give_core_back)
        assert one.cores == ALL
        one.end()
    assert os.sched_getaffinity(0) == ALL


@several_cores
def test_who_takes_a_core_stays_there_and_others_keep_off_it(threads: tuple[Enlisted, Enlisted]) -> None:
    one, other = threads
    assert one.do(cores.take_core)
    assert not one.do(cores.take_core), "it has it"
    assert len(one.cores) == 1
    assert other.cores == ALL - one.cores
    assert os.sched_getaffinity(0) == ALL, "this thread is the host's"
    other.do(cores.give_core_back)
    assert len(one.cores) == 1, "it was not the other's to give"
    one.do(cores.give_core_back)
    assert one.cores == other.cores == ALL


@several_cores
def test_a_core_passes_from_one_to_another(threads: tuple[Enlisted, Enlisted]) -> None:
    one, other = threads
    one.do(cores.take_core)
    assert other.do(cores.take_core)
    assert len(other.cores) == 1
    assert one.cores == ALL - other.cores
    one.do(cores.give_core_back)
    assert len(other.cores) == 1
    other.do(cores.give_core_back)
    assert one.cores == other.cores == ALL


@several_cores
def test_a_thread_that_is_started_by_who_has_a_core_keeps_off_it_too(threads: tuple[Enlisted, Enlisted]) -> None:
    """It begins where that one is bound, and would stay there for good."""
    one, _ = threads
    one.do(cores.take_core)
    third = one.do(Enlisted)
    assert third.cores == ALL - one.cores
    one.do(cores.give_core_back)
    assert third.cores == ALL
    third.end()


@several_cores
def test_threads_that_have_ended_are_left_alone(threads: tuple[Enlisted, Enlisted]) -> None:
    one, other = threads
    third = Enlisted()
    one.do(cores.take_core)
    third.end()
    one.do(cores.give_core_back)
    assert one.cores == other.cores == ALL


def test_where_the_system_does_not_let_us_everything_goes_on(
    monkeypatch: pytest.MonkeyPatch, threads: tuple[Enlisted, Enlisted]
) -> None:
    def refuse(thread: int, cores: set[int]) -> None:
        raise PermissionError("not here")

    one, other = threads
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    one.do(cores.take_core)
    assert one.cores == other.cores == ALL
    one.do(cores.give_core_back)


def test_one_core_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    lonely = Enlisted()
    assert not lonely.do(cores.take_core)
    lonely.end()


@several_cores
def test_a_thread_is_kept_off_the_core_of_who_says_so(threads: tuple[Enlisted, Enlisted]) -> None:
    """As the loop says of the agents' thread in a burst; a core that another thread has to itself goes first."""
    one, other = threads
    place = one.do(cores.enlist)
    place.let_go()
    assert one.cores == ALL
    here = other.do(keep_off(place))
    assert one.cores == ALL - here
    other.do(cores.take_core)
    assert one.cores == ALL - other.cores
    one.do(cores.take_core)
    assert len(one.cores) == 1
    one.do(cores.give_core_back)
    assert one.cores == ALL - here
    place.let_go()
    assert one.cores == ALL


@several_cores
def test_a_forked_process_leaves_its_parents_threads_alone(threads: tuple[Enlisted, Enlisted]) -> None:
    one, other = threads
    places = [thread.do(cores.enlist) for thread in threads]  # kept, as the transport's loop side does
    one.do(cores.take_core)
    before = one.cores, other.cores
    if not (child := os.fork()):
        cores.enlist()
        took = cores.take_core()
        cores.give_core_back()
        os._exit(0 if took and os.sched_getaffinity(0) == ALL else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (one.cores, other.cores) == before
    assert len(places) == 2


def keep_off(place: cores.Place) -> Callable[[], set[int]]:
    """Keep a thread off the core of who calls what is returned; which that is."""

    def call() -> set[int]:
        with cores.own_core():
            place.keep_off_here()
            return os.sched_getaffinity(0)

    return call


@several_cores
def test_a_block_has_a_core_and_gives_it_back_whatever_happens(threads: tuple[Enlisted, Enlisted]) -> None:
    one, other = threads

    def fail() -> None:
        with pytest.raises(RuntimeError, match="no more"), cores.own_core():
            assert len(one.cores) == 1
            with cores.own_core():
                pass
            assert other.cores == ALL - one.cores, "it had the core before"
            raise RuntimeError("no more")

    one.do(fail)
    assert one.cores == other.cores == ALL


# --- who uses it


def test_a_thread_of_the_host_is_not_moved() -> None:
    assert not cores.take_core()
    with cores.own_core():
        assert os.sched_getaffinity(0) == ALL
    cores.give_core_back()


@several_cores
def test_a_helper_works_on_another_core(threads: tuple[Enlisted, Enlisted]) -> None:
    helper, both = Helper("help"), threading.Barrier(2, timeout=WAIT_S)

    def work() -> tuple[str, frozenset[int]]:
        both.wait()
        found = frozenset(os.sched_getaffinity(0))
        both.wait()
        return threading.current_thread().name, found

    for _ in range(2):  # the first starts it
        (_, my_cores), (its, its_cores) = threads[0].do(lambda: helper.share(work))
        assert its == "help_0"
        assert len(my_cores) == 1
        assert its_cores == ALL - my_cores
    helper.end()
    assert helper.share(threading.get_ident) != [threading.get_ident()] * 2, "of a host's thread: nobody is moved"
    assert os.sched_getaffinity(0) == ALL
    helper.end()


@several_cores
async def test_the_copy_thread_keeps_its_core_until_it_was_idle_for_a_while() -> None:
    copies, other = CopyThread("copies"), CopyThread("other")
    seen: list[set[int]] = []

    def look() -> None:
        seen.append(os.sched_getaffinity(0))

    await other.run(look)
    copies.take_core()
    await copies.run(look)
    await other.run(look)
    assert seen[0] == ALL
    assert len(seen[1]) == 1
    assert seen[2] == ALL - seen[1]
    thread = copies._thread
    assert thread is not None
    native_id = thread._thread.native_id
    assert native_id is not None
    await until(lambda: os.sched_getaffinity(native_id) == ALL)
    await other.run(look)
    assert seen[3] == ALL
    copies.take_core()
    assert await copies.aclose(WAIT_S)
    await other.run(look)
    assert seen[4] == ALL
    assert await other.aclose(WAIT_S)


@several_cores
async def test_the_agents_thread_keeps_off_the_loops_core_while_both_have_much_to_do() -> None:
    copies = CopyThread("agents")
    await copies.run(lambda: None)
    thread = copies._thread
    assert thread is not None
    native_id = thread._thread.native_id
    assert native_id is not None
    thread.work_beside_loop(True)
    assert len(os.sched_getaffinity(native_id)) == len(ALL) - 1
    thread.work_beside_loop(False)
    assert os.sched_getaffinity(native_id) == ALL
    assert await copies.aclose(WAIT_S)
    thread.work_beside_loop(True)  # it has ended


async def test_a_helper_ends_with_the_copy_thread() -> None:
    copies = CopyThread("copies")
    await copies.run(lambda: None if copies.helper.share(lambda: 1) == [1, 1] else pytest.fail("not two"))
    assert await copies.aclose(WAIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("copies")]
