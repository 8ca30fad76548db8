"""Turns of first contacts, without peers. `core/policy/contacts.py` decides whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests_support import in_virtual_time, turns, until

from kvflow import Config, Limits
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.contacts import Contact
from kvflow.core.protocol.addresses import Address
from kvflow.errors import PeerUnreachable
from kvflow.runtime.peers.first_contacts import FirstContacts

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
        return asyncio.create_task(self.contacts.ask_in_turn(address, question, begin), name=name)

    def answer(self, name: str) -> None:
        self.answers[name].set_result("")


async def turns_settle() -> None:
    await turns(5)


async def pass_time(seconds: float) -> None:
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)
    await turns_settle()


@contextlib.asynccontextmanager
async def asking(names: str = "") -> AsyncIterator[tuple[Questions, dict[str, asyncio.Task[str]]]]:
    """Ask a question for each name. Afterwards open questions are cancelled."""
    questions = Questions()
    tasks = {name: questions.ask(name) for name in names}
    await turns_settle()
    yield questions, tasks
    for task in tasks.values():
        task.cancel()
    await asyncio.wait(tasks.values())
    assert questions.contacts.under_way == 0
    assert questions.contacts._timer is None, "nobody is left to look after"


@in_virtual_time
async def test_silence_makes_way_one_after_the_other() -> None:
    async with asking("ab") as (questions, tasks):
        await pass_time(4 * PATIENCE_S)
        assert list(questions.begun) == ["a", "b"], "nobody else wanted a turn"
        tasks["c"] = questions.ask("c")
        await turns_settle()
        assert not any(task.done() for task in tasks.values())
        assert list(questions.begun) == ["a", "b", "c"]
        asked_first = questions.answers["a"]
        await pass_time(2 * PATIENCE_S)
        assert asked_first is questions.answers["a"], "nobody makes way for one that had a turn"
        for name in "bca":
            questions.answer(name)
            await tasks[name]
            await turns_settle()
        assert asked_first is not questions.answers["a"], "it was asked again"


@in_virtual_time
async def test_peers_that_answer_slowly_are_all_heard() -> None:
    """As after a restart of this engine, when all prefill engines are new to it at once, and busy."""

    async def question() -> str:
        await pass_time(1.2 * PATIENCE_S)
        return "an answer"

    contacts = FirstContacts(CONFIG)
    places = [Address(f"p{number}", Rank(0, 0, 0), f"tcp://p{number}:1") for number in range(6)]
    asked = [asyncio.create_task(contacts.ask_in_turn(place, question, lambda _: None)) for place in places]
    assert await asyncio.gather(*asked) == ["an answer"] * len(places)
    assert contacts.under_way == 0


@in_virtual_time
async def test_a_silent_peer_that_gets_no_further_turn_is_unreachable() -> None:
    async with asking("ab") as (questions, tasks):
        await pass_time(PATIENCE_S)
        tasks["c"] = questions.ask("c")
        with pytest.raises(PeerUnreachable, match=r"^engine 'a' .* no answer within 0\.5 s, and others wait") as caught:
            await tasks["a"]
        assert (caught.value.peer, caught.value.engine_id) == ("tcp://a:1", "a")
        assert asyncio.get_running_loop().time() == pytest.approx(CONFIG.handshake_timeout_s)


@pytest.mark.parametrize("given_up", ["a", "c"], ids=["under way", "waiting"])
@in_virtual_time
async def test_giving_up_gives_the_turn_or_the_place_back(given_up: str) -> None:
    async with asking("abcd") as (questions, tasks):
        tasks[given_up].cancel()
        await turns_settle()
        assert tasks[given_up].cancelled()
        assert list(questions.begun) == (["a", "b", "d"] if given_up == "a" else ["a", "b"])


@pytest.mark.parametrize("given", [True, False], ids=["turn given", "turn on its way"])
@in_virtual_time
async def test_a_turn_that_comes_while_its_owner_gives_up_goes_to_the_next(given: bool) -> None:
    async with asking("abcd") as (questions, tasks):
        questions.answer("a")
        if given:
            await until(lambda: tasks["a"].done())
        tasks["d"].cancel()  # it has the turn, and does not know yet; or has not even got it
        assert await tasks["a"] == ""
        await turns_settle()
        assert tasks["d"].cancelled()
        assert list(questions.begun) in (["a", "b", "c"], ["a", "b", "d", "c"])


@in_virtual_time
async def test_a_question_that_fails_gives_its_turn_back_and_its_error_on() -> None:
    async with asking("abc") as (questions, tasks):
        questions.answers["a"].set_exception(TimeoutError("its own"))
        with pytest.raises(TimeoutError, match="its own"):
            await tasks["a"]
        await turns_settle()
        assert list(questions.begun) == ["a", "b", "c"]
