"""Virtual time: jumps, order, deadlocks, and processes that freeze and die."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvflow.testing.virtual_loop import (
    Deadlock,
    SimProcess,
    SimProcessState,
    VirtualLoop,
    new_virtual_loop,
    run_virtual,
)
from tests.support.tests_support import in_virtual_time


def running_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


@in_virtual_time
async def test_time_jumps_to_the_next_timer() -> None:
    await asyncio.sleep(365 * 86400.0)
    assert running_loop().time() == 365 * 86400.0


@in_virtual_time
async def test_timers_run_in_order_and_equal_ones_as_they_were_set() -> None:
    loop, seen = running_loop(), list[str]()
    for name, delay_s in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("never", 1.5)):
        timer = loop.call_later(delay_s, seen.append, name)
        if name == "never":
            timer.cancel()
    await asyncio.sleep(3.0)
    assert seen == ["a", "b", "c"]


@in_virtual_time
async def test_asyncio_works_on_it() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

    async def produce() -> None:
        for number in range(3):
            await asyncio.sleep(1.0)
            await queue.put(number)

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        assert [await queue.get() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5.0):
            await queue.get()
    assert running_loop().time() == 8.0


def test_a_deadlock_names_who_waits() -> None:
    async def wait_forever() -> None:
        lost = asyncio.create_task(asyncio.Event().wait(), name="waits for nobody")
        await lost

    with pytest.raises(Deadlock, match=r"tasks that wait: .*, waits for nobody"):
        run_virtual(wait_forever())


@in_virtual_time
async def test_there_are_no_threads_and_no_sockets() -> None:
    loop = running_loop()
    with pytest.raises(NotImplementedError):
        await loop.run_in_executor(None, print)
    with pytest.raises(NotImplementedError):
        await asyncio.open_connection("127.0.0.1", 1)
    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match="one thread"):
        thread.submit(loop.call_soon_threadsafe, print).result()


@in_virtual_time
async def test_an_error_in_a_callback_reaches_the_handler() -> None:
    seen: list[str] = []
    loop = running_loop()
    loop.set_exception_handler(lambda _, context: seen.append(repr(context["exception"])))
    loop.call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)
    assert seen == ["ZeroDivisionError('division by zero')"]


def test_what_a_coroutine_raises_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        run_virtual(fail())


@in_virtual_time
async def test_tasks_keep_their_order_in_sets() -> None:
    """asyncio keeps tasks in sets: by address they would be in another order in every process."""
    tasks = {asyncio.create_task(asyncio.sleep(0), name=f"{index}") for index in range(8)}
    await asyncio.wait(tasks)
    assert [task.get_name() for task in tasks] == [str(index) for index in range(8)]


def test_a_loop_that_is_closed_runs_nothing() -> None:
    loop = new_virtual_loop()
    loop.close()
    assert loop.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_forever()


# --- lives


async def tick(seen: list[float]) -> None:
    try:
        while True:
            await asyncio.sleep(1.0)
            seen.append(running_loop().time())
    finally:
        seen.append(-1.0)


@in_virtual_time
async def test_a_frozen_life_is_late_and_goes_on() -> None:
    seen: list[float] = []
    life = SimProcess(running_loop(), "engine")
    task = life.task(tick(seen))
    await asyncio.sleep(2.5)
    life.freeze()
    await asyncio.sleep(5.0)
    assert seen == [1.0, 2.0]
    life.thaw()
    await asyncio.sleep(2.0)
    task.cancel()
    await asyncio.wait([task])
    assert (seen, life.frozen_s) == ([1.0, 2.0, 7.5, 8.5, -1.0], 5.0)


@in_virtual_time
async def test_what_a_life_starts_belongs_to_it() -> None:
    seen: list[float] = []
    life = SimProcess(running_loop(), "engine")

    async def parent() -> None:
        await asyncio.create_task(tick(seen))

    life.task(parent())
    await asyncio.sleep(1.5)
    life.freeze()
    await asyncio.sleep(5.0)
    life.kill()
    assert seen == [1.0]
    await asyncio.wait(life.cancel_dead())


@in_virtual_time
async def test_a_killed_life_runs_not_even_its_finally() -> None:
    seen: list[float] = []
    life = SimProcess(running_loop(), "engine")
    task = life.task(tick(seen))
    await asyncio.sleep(1.5)
    life.kill()
    life.thaw()
    assert life.state is SimProcessState.DEAD
    task.cancel()
    await asyncio.sleep(10.0)
    assert seen == [1.0]
    assert not task.done()
    assert life.cancel_dead() == [task]
    await asyncio.wait([task])
    assert seen == [1.0, -1.0]


@in_virtual_time
async def test_a_task_that_never_began_is_buried_too() -> None:
    life = SimProcess(running_loop(), "engine")
    life.freeze()
    task = life.task(tick([]))
    await asyncio.sleep(1.0)
    life.kill()
    await asyncio.wait(life.cancel_dead())
    assert task.cancelled()
