"""Every error of a load names the caller's request, not the ticket's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from kvflow import Lease, LoadRequest, ServeRequest, Ticket, errors
from kvflow.core.protocol import messages
from kvflow.errors import KVFlowError, LoadError, PeerError
from kvflow.runtime.load.load import Load
from kvflow.testing import InprocPair
from kvflow.transport.base import TransportError
from kvflow.verify.digest_request import DigestRequest
from tests.runtime.test_events import Event
from tests.support.scripted import ScriptedSideChannel, refusal, scripted_pair
from tests.support.tests_support import PATIENT, Records, each, in_virtual_time, limited

CONFIG = limited(replace(PATIENT, listen="tcp://127.0.0.1:0", cancel_grace_s=1.0), lease_wait_s=1.0)
NARROW = limited(replace(CONFIG, loads_waiting_max=1), source_ranks_max=1)
ALONE = limited(CONFIG, peers_max=1)
OURS, THEIRS = "of its caller", "of its ticket"


@dataclass
class Scene:
    """Two engines, and what the reader is answered."""

    pair: InprocPair
    channel: ScriptedSideChannel

    def offer(self, block_ids: Any = (3, 4), num_tokens: int = 8, **more: Any) -> Lease:
        request = ServeRequest(THEIRS, block_ids, num_tokens, **more)
        return self.pair.producer.runtime.serve_blocks(request)

    def load(self, ticket: Ticket | Lease, block_ids: Any = (0, 1), **more: Any) -> Load:
        params = (ticket.ticket if isinstance(ticket, Lease) else ticket).to_params()
        return self.pair.consumer.runtime.start_load(LoadRequest(more.pop("name", OURS), params, block_ids, **more))

    def unnamed(self) -> Ticket:
        """A ticket that names no lease."""
        return self.hello.without_leases(request_id=THEIRS, block_ids=[3, 4], num_tokens=8, ttl_s=9.0)

    @property
    def hello(self) -> Ticket:
        return self.pair.producer.runtime.introduce()

    @property
    def rendezvous(self) -> Ticket:
        return Ticket.rendezvous(self.hello, THEIRS, ttl_s=1.0)

    def answer(self, *outcomes: Any) -> None:
        """The next questions get these; True: what the peer itself answers."""
        self.channel.script.extend((lambda reply: reply) if one is True else one for one in outcomes)

    async def meet(self) -> None:
        """The engines know each other."""
        await self.pair.consumer.runtime.prewarm([self.hello])


Failing = Callable[[Scene], Coroutine[Any, Any, Load]]


def task_of(load: Load) -> asyncio.Task[Any]:
    assert load._task is not None
    return load._task


async def under_way(*loads: Load) -> None:
    """Wait a moment, and assert that the loads have not ended."""
    await asyncio.wait(map(task_of, loads), timeout=0.1)
    assert not any(load.done for load in loads)


def forged(lease: Lease, **changes: Any) -> Ticket:
    return msgspec.structs.replace(lease.ticket, **changes)


# --- leases


async def revoked(scene: Scene) -> Load:
    return scene.load(scene.offer().revoke())


async def long_revoked(scene: Scene) -> Load:
    lease = scene.offer()
    await lease.revoke()
    return scene.load(lease)


async def broken_prefill(scene: Scene) -> Load:
    return scene.load(scene.offer(computed_tokens=0).fail("out of memory"))


async def grows_and_breaks(scene: Scene) -> Load:
    lease = scene.offer((3,), computed_tokens=0, extends=True)
    load = scene.load(lease)
    await under_way(load)
    lease.fail("out of memory")
    return load


async def grows_and_goes(scene: Scene) -> Load:
    lease = scene.offer(computed_tokens=0)
    load = scene.load(lease)
    await under_way(load)
    lease.revoke()
    return load


async def payload_never_comes(scene: Scene) -> Load:
    lease = scene.offer(payload=True)
    load = scene.load(lease, ())
    await under_way(load)
    lease.revoke()
    return load


async def never_served(scene: Scene) -> Load:
    return scene.load(scene.unnamed())


async def served_before(scene: Scene) -> Load:
    await scene.offer().revoke()
    return scene.load(scene.unnamed())


async def restarted(scene: Scene) -> Load:
    ticket, producer = scene.offer().ticket, scene.pair.producer
    await producer.runtime.unregister()
    await producer.runtime.register_kv_caches(producer.kv_caches, producer.layout)
    return scene.load(ticket)


# --- rendezvous


async def declined(scene: Scene) -> Load:
    ticket = scene.rendezvous
    scene.pair.producer.runtime.decline(THEIRS, "no")
    return scene.load(ticket)


async def never_opened(scene: Scene) -> Load:
    return scene.load(scene.rendezvous)


async def opened_before(scene: Scene) -> Load:
    ticket = scene.rendezvous
    await scene.offer().revoke()
    return scene.load(ticket)


async def of_another_prompt(scene: Scene) -> Load:
    ticket = scene.rendezvous
    scene.offer(prompt=range(8))
    return scene.load(ticket, prompt=range(1, 9))


async def of_another_length(scene: Scene) -> Load:
    ticket = scene.rendezvous
    scene.offer()
    return scene.load(ticket, num_tokens=7)


async def nonsense_is_offered(scene: Scene) -> Load:
    ticket = scene.rendezvous
    scene.answer(True, messages.LeaseAnswer(state=messages.LeaseAnswerState.WAITING), messages.Ack(incarnation="i"))
    return scene.load(ticket)


# --- peers


async def silent(scene: Scene) -> Load:
    scene.channel.mute = (messages.MetadataRequest,)
    return scene.load(scene.offer())


async def silent_lately(scene: Scene) -> Load:
    lease = scene.offer()
    scene.channel.mute = (messages.MetadataRequest,)
    with pytest.raises(errors.PeerUnreachable):
        await scene.load(lease, name="before")
    return scene.load(lease)


async def silent_about_news(scene: Scene) -> Load:
    scene.channel.mute = (messages.LeaseRequest,)
    return scene.load(scene.offer((3,), computed_tokens=0, extends=True))


async def silent_about_digests(scene: Scene) -> Load:
    scene.channel.mute = (DigestRequest,)
    return scene.load(scene.offer(), verify=True)


async def silent_at_a_rendezvous(scene: Scene) -> Load:
    scene.channel.mute = (messages.LeaseRequest,)
    return scene.load(scene.rendezvous)


def answered(*outcomes: Any) -> Failing:
    async def scenario(scene: Scene) -> Load:
        scene.answer(*outcomes)
        return scene.load(scene.unnamed())

    return scenario


async def bad_news(scene: Scene) -> Load:
    scene.answer(True, messages.Ack(incarnation="i"))
    return scene.load(scene.offer((3,), computed_tokens=0, extends=True))


async def no_room_for_a_peer(scene: Scene) -> Load:
    busy = scene.load(scene.offer(computed_tokens=0), name="before")
    await under_way(busy)
    load = scene.load(msgspec.structs.replace(scene.unnamed(), engine_id="another"), (2, 5))
    await asyncio.wait([task_of(load)])
    busy.cancel()
    return load


# --- the load itself


async def too_late(scene: Scene) -> Load:
    return scene.load(scene.offer(computed_tokens=0), deadline_s=0.5)


async def too_late_for_a_rendezvous(scene: Scene) -> Load:
    return scene.load(scene.rendezvous, deadline_s=0.5)


async def too_many(scene: Scene) -> Load:
    lease = scene.offer(computed_tokens=0)
    others = [scene.load(lease, ids, name="before") for ids in ((2, 5), (6, 7))]
    await under_way(*others)
    load = scene.load(lease)
    await asyncio.wait([task_of(load)])
    for one in others:
        one.cancel()
    return load


async def a_read_fails(scene: Scene) -> Load:
    scene.pair.consumer.transport.faults.fail_next.append(TransportError("lost"))
    return scene.load(scene.offer())


async def an_event_fails(scene: Scene) -> Load:
    event = Event()
    load = scene.load(scene.offer(), after=event)
    await under_way(load)
    event.error = RuntimeError("the device was lost")
    return load


async def other_bytes(scene: Scene) -> Load:
    scene.pair.consumer.transport.faults.flip_next = 2
    return scene.load(scene.offer(), verify=True)


async def no_digests_any_more(scene: Scene) -> Load:
    await scene.meet()
    scene.answer(messages.LeaseAnswer(state=messages.LeaseAnswerState.ENDED))
    return scene.load(scene.offer(), verify=True)


async def busy_blocks(scene: Scene) -> Load:
    scene.pair.consumer.runtime.serve_blocks(ServeRequest("own", [0], num_tokens=4))
    return scene.load(scene.offer())


async def too_many_blocks(scene: Scene) -> Load:
    return scene.load(scene.offer(), (0, 1, 2))


async def a_block_that_is_not_there(scene: Scene) -> Load:
    return scene.load(forged(scene.offer(), block_ids=(3, 999)))


async def a_seal_that_is_not_there(scene: Scene) -> Load:
    lease = scene.offer()
    rank = msgspec.structs.replace(lease.ticket.first, seal_index=1 << 30)
    return scene.load(forged(lease, ranks=(rank,)))


async def ranks_that_cannot_be(scene: Scene) -> Load:
    return scene.load(forged(scene.offer(), pp_size=7))


async def the_reader_closes(scene: Scene) -> Load:
    load = scene.load(scene.offer(computed_tokens=0))
    await under_way(load)
    await scene.pair.consumer.runtime.aclose()
    return load


async def the_reader_closes_while_it_meets(scene: Scene) -> Load:
    load = scene.load(Ticket.rendezvous(scene.hello, THEIRS, ttl_s=60.0))
    await under_way(load)
    await scene.pair.consumer.runtime.aclose()
    return load


async def the_reader_sleeps(scene: Scene) -> Load:
    load = scene.load(scene.offer(computed_tokens=0))
    await under_way(load)
    await scene.pair.consumer.runtime.unregister()
    return load


CASES: list[tuple[Failing, type[KVFlowError]]] = [
    (revoked, errors.LeaseExpired),
    (long_revoked, errors.LeaseExpired),
    (broken_prefill, errors.PrefillFailed),
    (grows_and_breaks, errors.PrefillFailed),
    (grows_and_goes, errors.LeaseExpired),
    (payload_never_comes, errors.LeaseExpired),
    (never_served, errors.LeaseExpired),
    (served_before, errors.LeaseExpired),
    (restarted, errors.LeaseExpired),
    (declined, errors.PrefillFailed),
    (never_opened, errors.PrefillFailed),
    (opened_before, errors.LeaseExpired),
    (of_another_prompt, errors.PromptMismatch),
    (of_another_length, errors.PromptMismatch),
    (nonsense_is_offered, errors.ProtocolError),
    (silent, errors.PeerUnreachable),
    (silent_lately, errors.PeerUnreachable),
    (silent_about_news, errors.PeerUnreachable),
    (silent_about_digests, errors.PeerUnreachable),
    (silent_at_a_rendezvous, errors.PeerUnreachable),
    (answered(refusal("no")), errors.PeerRefused),
    (answered(refusal("later", transient=True)), errors.PeerNotReady),
    (answered(refusal("other", version=7)), errors.PeerIncompatible),
    (answered(messages.Ack(incarnation="i")), errors.ProtocolError),
    (answered(True, messages.Ack(incarnation="i")), errors.ProtocolError),
    (answered(True, refusal("no")), errors.PeerRefused),
    (bad_news, errors.ProtocolError),
    (no_room_for_a_peer, errors.Overloaded),
    (too_late, errors.DeadlineExceeded),
    (too_late_for_a_rendezvous, errors.DeadlineExceeded),
    (too_many, errors.Overloaded),
    (a_read_fails, errors.TransferFailed),
    (an_event_fails, errors.TransferFailed),
    (other_bytes, errors.ChecksumMismatch),
    (no_digests_any_more, errors.LeaseExpired),
    (busy_blocks, errors.BlocksBusy),
    (too_many_blocks, errors.RequestError),
    (a_block_that_is_not_there, errors.RequestError),
    (a_seal_that_is_not_there, KVFlowError),
    (ranks_that_cannot_be, errors.RequestError),
    (the_reader_closes, errors.RuntimeClosed),
    (the_reader_closes_while_it_meets, errors.RuntimeClosed),
    (the_reader_sleeps, errors.CacheUnregistered),
]
SETTINGS = {too_many: NARROW, no_room_for_a_peer: ALONE}


@each(("failing", "kind"), CASES)
@in_virtual_time
async def test_an_error_names_the_request_of_its_load(failing: Failing, kind: type[KVFlowError]) -> None:
    records = Records()
    async with scripted_pair(SETTINGS.get(failing, CONFIG)) as (pair, channel):
        with pair.consumer.runtime._observers.adding(records):
            load = await failing(Scene(pair, channel))
            with pytest.raises(kind) as caught:
                await load
        error = caught.value
        assert isinstance(error, KVFlowError)
        if isinstance(error, LoadError | PeerError):
            assert error.request_id == OURS
            assert error.peer
        assert str(error).startswith((f"request {OURS!r}", "ticket: "))
        assert error.quarantine is None
        told = [(one.request_id, one.error) for one in records.loads if one.request_id != "before"]
        assert told == [(OURS, str(error))]


def test_every_error_of_a_load_is_among_them() -> None:
    """Except for errors of refused requests, of a transport that dies, and of leases."""
    found = {kind for _, kind in CASES}
    every = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LoadError | PeerError)
    }
    assert every - found == {LoadError, PeerError, errors.HostBlocksBusy}
