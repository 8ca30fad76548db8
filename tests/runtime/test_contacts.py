"""Turns of first contacts, without peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests_support import turns, until

from kvflow import Config, Limits
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.contacts import Contact
from kvflow.core.protocol.addresses import Address
from kvflow.errors import Overloaded, PeerUnreachable
from kvflow.runtime.peers.contacts import FirstContacts
from kvflow.testing import run_virtual

CONFIG = Config(engine_id="any", handshake_timeout_s=5.0, limits=Limits(first_contacts_max=2))
PATIENCE_S = 0.5


class Questions:
    """First contacts that answer when the test says so."""

    def __init__(self) -> None:
        self.contacts = FirstContacts(CONFIG)
        self.begun: dict[str, Contact] = {}
        self.answers: dict[str, asyncio.Future[str]] = {}

    def ask(self, name: str) -> asyncio.Task[str]:
        async def question() -> str:
            self.answers[name] = asyncio.get_running_loop().create_future()
            return await self.answers[name]

        def begin(contact: Contact) -> None:
            self.begun[name] = contact

        address = Address(name, Rank(0, 0, 0), f"tcp://{name}:1")
        return asyncio.create_task(self.contacts.ask(address, question, begin), name=name)


async def turns_settle() -> None:
    await turns(5)


async def pass_time(seconds: float) -> None:
    passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, passed.set_result, None)
    await passed
    await turns_settle()


def in_virtual_time(body: Callable[[Questions], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        questions = Questions()
        await body(questions)
        assert questions.contacts.under_way == 0
        assert questions.contacts._timer is None, "nobody is left to look after"

    run_virtual(main())


def test_who_answers_makes_room_for_who_came_last() -> None:
    async def body(questions: Questions) -> None:
        tasks = {name: questions.ask(name) for name in "abcd"}
        await turns_settle()
        assert list(questions.begun) == ["a", "b"]
        for answered, begun in (("a", "d"), ("b", "c"), ("d", None), ("c", None)):
            questions.answers[answered].set_result(answered.upper())
            assert await tasks[answered] == answered.upper()
            await turns_settle()
            assert begun is None or list(questions.begun)[-1] == begun

    in_virtual_time(body)


def test_silence_makes_way_one_after_the_other() -> None:
    async def body(questions: Questions) -> None:
        silent = [questions.ask(name) for name in "ab"]
        await turns_settle()
        await pass_time(10 * PATIENCE_S)
        assert list(questions.begun) == ["a", "b"], "nobody else wanted a turn"
        late = questions.ask("c")
        await turns_settle()
        assert [task.done() for task in silent] == [True, False]
        assert list(questions.begun) == ["a", "b", "c"]
        with pytest.raises(PeerUnreachable, match=r"^engine 'a' .* no answer within 0\.5 s, and others wait") as caught:
            await silent[0]
        assert (caught.value.peer, caught.value.engine_id) == ("tcp://a:1", "a")
        for name, task in (("b", silent[1]), ("c", late)):
            questions.answers[name].set_result("")
            await task

    in_virtual_time(body)


def test_who_is_not_wanted_any_more_makes_way_at_once() -> None:
    async def body(questions: Questions) -> None:
        first, second = questions.ask("a"), questions.ask("b")
        await turns_settle()
        third = questions.ask("c")
        await turns_settle()
        questions.begun["b"].wanted = False
        questions.contacts.look()
        await turns_settle()
        assert second.done()
        assert isinstance(second.exception(), PeerUnreachable)
        for name, task in (("a", first), ("c", third)):
            questions.answers[name].set_result("")
            await task

    in_virtual_time(body)


def test_who_is_always_passed_is_told_that_there_was_no_turn() -> None:
    async def body(questions: Questions) -> None:
        tasks = [questions.ask("a"), questions.ask("b")]
        await turns_settle()
        unlucky = questions.ask("unlucky")
        for at in range(60):
            tasks.append(questions.ask(f"later-{at}"))
            await pass_time(0.1)
        with pytest.raises(Overloaded, match=r"no turn to ask it within 5\.0 s: 2 other .*first_contacts_max"):
            await unlucky
        assert "unlucky" not in questions.begun
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    in_virtual_time(body)


@pytest.mark.parametrize("given_up", ["a", "c"], ids=["under way", "waiting"])
def test_giving_up_gives_the_turn_or_the_place_back(given_up: str) -> None:
    async def body(questions: Questions) -> None:
        tasks = {name: questions.ask(name) for name in "abcd"}
        await turns_settle()
        tasks[given_up].cancel()
        await turns_settle()
        assert tasks[given_up].cancelled()
        assert list(questions.begun) == (["a", "b", "d"] if given_up == "a" else ["a", "b"])
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(tasks.values())

    in_virtual_time(body)


def test_a_turn_that_comes_while_its_owner_gives_up_goes_to_the_next() -> None:
    async def body(questions: Questions) -> None:
        tasks = {name: questions.ask(name) for name in "abcd"}
        await turns_settle()
        questions.answers["a"].set_result("")
        await until(lambda: tasks["a"].done())
        tasks["d"].cancel()  # it has the turn, and does not know yet
        await turns_settle()
        assert tasks["d"].cancelled()
        assert list(questions.begun) in (["a", "b", "c"], ["a", "b", "d", "c"])
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(tasks.values())

    in_virtual_time(body)


def test_a_question_that_fails_gives_its_turn_back_and_its_error_on() -> None:
    async def body(questions: Questions) -> None:
        tasks = {name: questions.ask(name) for name in "abc"}
        await turns_settle()
        questions.answers["a"].set_exception(TimeoutError("its own"))
        with pytest.raises(TimeoutError, match="its own"):
            await tasks["a"]
        await turns_settle()
        assert list(questions.begun) == ["a", "b", "c"]
        for name in "bc":
            questions.answers[name].set_result("")
            await tasks[name]

    in_virtual_time(body)
