"""CURVE on the side channel: allowed keys get through, other keys get no answer and an explanation."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from pairs import EnginePair, host_of
from side_channels import ANSWER, PLAIN, REQUEST, address_of, ask, asking, listening, seen, to
from tests_support import WAIT_S, until

from kvflow import Config, LeaseOutcome, Runtime, ServeRequest, Ticket
from kvflow.core.protocol import codec, messages
from kvflow.errors import ConfigError, PeerRefused, PeerUnreachable
from kvflow.runtime.channel.asking import ATTEMPTS_MAX
from kvflow.runtime.channel.keyring import KeyPair, Keyring, make_key_files
from kvflow.testing import InprocNetwork, InprocTransport, ManualClock, TestEngine
from kvflow.testing.pair import open_engine


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys of three engines; `stranger` is in another one."""
    for name in ("producer", "reader", "other"):
        make_key_files(tmp_path / "keys", name)
    make_key_files(tmp_path / "strangers", "stranger")
    return tmp_path / "keys"


def config_of(keys: Path, engine_id: str, *, secret_of: str | None = None, folder: Path | None = None) -> Config:
    """An engine with the key that is in its name, or another one's."""
    secret = (folder or keys) / f"{secret_of or engine_id}.secret"
    return replace(PLAIN, engine_id=engine_id, curve_secret_key_file=secret, curve_peers_dir=keys)


@contextlib.asynccontextmanager
async def pair_with(keys: Path) -> AsyncIterator[EnginePair]:
    network = InprocNetwork()

    def open_one(engine_id: str) -> AbstractAsyncContextManager[TestEngine]:
        return open_engine(engine_id, config_of(keys, engine_id), lambda _, name: InprocTransport(name, network))

    async with open_one("producer") as producer, open_one("reader") as reader:
        yield EnginePair(producer=producer, consumer=reader)


async def test_engines_that_know_each_other_load(keys: Path) -> None:
    async with pair_with(keys) as pair:
        lease = pair.offer([2])
        await pair.load(lease)
        assert await lease is LeaseOutcome.READ
        assert (pair.listener.answered, pair.listener.refused, pair.listener.rejected) == (1, 0, 0)


async def test_both_legs_at_once_with_keys(keys: Path) -> None:
    async with pair_with(keys) as pair:
        hello = pair.writer.introduce()
        load = pair.start(Ticket.rendezvous(hello, "secret"), [0, 1])
        await until(lambda: host_of(pair.writer).serving.lease_answers.waiting)
        request = ServeRequest("secret", [2], num_tokens=8, computed_tokens=0, payload=True)
        lease = pair.writer.serve_blocks(request)
        lease.extend([3])
        lease.complete(b"token")
        assert (await load).payload == b"token"
        assert await lease is LeaseOutcome.READ


async def test_an_answer_comes_encrypted(keys: Path) -> None:
    """Neither the question nor the answer is readable on the wire."""
    heard: list[bytes] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            heard.append(data)
            writer.write(data)
        writer.close()

    async with listening(config_of(keys, "producer")) as listener, asyncio.TaskGroup() as group:

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", listener.port)
            group.create_task(pump(reader, there[1]))
            group.create_task(pump(there[0], writer))

        between = await asyncio.start_server(forward, "127.0.0.1", 0)
        port = between.sockets[0].getsockname()[1]
        with asking(config_of(keys, "reader")) as channel:
            assert await channel.ask(to(f"tcp://127.0.0.1:{port}"), fingerprint=b"") == ANSWER
        between.close()
    assert b"CURVE" in b"".join(heard)
    for word in (b"producer", b"reader", b"get_metadata", b"no_lease"):
        assert word not in b"".join(heard)


async def test_a_key_that_is_not_listed_is_refused_at_once(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    stranger = config_of(keys, "stranger", folder=keys.parent / "strangers")
    async with listening(config_of(keys, "producer")) as listener:
        with pytest.raises(PeerRefused, match=r"CURVE: the peer does not accept our key.*stranger\.public"):
            await ask(listener, stranger)
        statistics = await seen(listener, rejected=1)
    assert (statistics.answered, statistics.refused, statistics.dropped) == (0, 0, 0)
    assert "its CURVE key is in no file of curve_peers_dir" in caplog.text


async def test_a_peer_that_we_do_not_list_is_not_even_called(keys: Path) -> None:
    (keys / "producer.public").unlink()
    async with listening(config_of(keys, "producer")) as listener:
        with pytest.raises(PeerRefused, match=r"CURVE: .*keys has no key of engine 'producer'"):
            await ask(listener, config_of(keys, "reader"))
        assert listener.statistics.answered == 0


async def test_somebody_else_at_the_address_gets_nothing(keys: Path) -> None:
    """A listener at a producer's address without its key cannot answer in its name, even if it is in the list."""
    async with listening(config_of(keys, "other")) as listener:
        with pytest.raises(PeerUnreachable, match=r"failed in its handshake.*our producer\.public is not the key"):
            await ask(listener, config_of(keys, "reader"))
        assert (await seen(listener, rejected=ATTEMPTS_MAX)).answered == 0


async def test_nobody_asks_in_the_name_of_another(keys: Path) -> None:
    liar = messages.MetadataRequest(reader="reader/0.0.0#1", target=REQUEST.target)
    async with listening(config_of(keys, "producer")) as listener:
        reply = await ask(listener, config_of(keys, "other"), liar)
    assert isinstance(reply, messages.Refusal)
    assert reply.reason == "the request names engine 'reader', its CURVE key belongs to 'other'"


@pytest.mark.parametrize("secure", ["reader", "producer"])
async def test_curve_on_one_side_only_is_said_on_both(
    keys: Path, secure: str, caplog: pytest.LogCaptureFixture
) -> None:
    configs = {name: replace(PLAIN, engine_id=name) for name in ("producer", "reader")}
    configs[secure] = config_of(keys, secure)
    expected = "it may not use CURVE, as we do" if secure == "reader" else "it may use CURVE, which we do not"
    async with listening(configs["producer"]) as listener, asyncio.timeout(WAIT_S):
        while listener.statistics.rejected == 0:  # the side that closes first may leave the other without a reason
            with pytest.raises(PeerUnreachable, match=f"failed in its handshake: {expected}"):
                await ask(listener, configs["reader"])
        assert listener.statistics.answered == 0
    assert "only one side uses CURVE" in caplog.text


async def test_the_first_protocols_of_zeromq_get_nothing(keys: Path) -> None:
    """They know no keys; ZeroMQ would speak them with a listener that uses none."""
    async with listening(config_of(keys, "producer")) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"\x01\x00" * 300)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        await seen(listener, connections=0, dropped=0, answered=0)


async def test_engines_join_and_leave_without_a_restart(keys: Path) -> None:
    clock = ManualClock()
    public = keys / "other.public"
    public.rename(keys.parent / "other.public")
    other = config_of(keys, "other")
    request = messages.MetadataRequest(reader="other/0.0.0#1", target=REQUEST.target)
    async with listening(config_of(keys, "producer"), clock) as listener:
        with pytest.raises(PeerRefused, match="does not accept our key"):
            await ask(listener, other, request)
        (keys.parent / "other.public").rename(public)
        clock.advance(2)
        assert await ask(listener, other, request) == ANSWER
        public.unlink()
        clock.advance(2)
        with pytest.raises(PeerRefused, match="does not accept our key"):
            await ask(listener, other, request)


async def test_a_connection_outlives_its_key_but_its_requests_do_not(keys: Path) -> None:
    clock = ManualClock()
    server, own = [await _pair(keys, name) for name in ("producer", "other")]
    curve = (server.public, own.public, own.secret)
    frames = codec.encode_frames(
        codec.our_header(b""), messages.MetadataRequest(reader="other/0.0.0#1", target=REQUEST.target)
    )
    async with listening(config_of(keys, "producer"), clock) as listener:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = curve
            dealer.connect(address_of(listener))
            await dealer.send_multipart(frames)
            await dealer.recv_multipart()
            (keys / "other.public").unlink()
            clock.advance(2)
            await dealer.send_multipart(frames)
            statistics = await seen(listener, refused=1)
            refusal = codec.decode_reply((await dealer.recv_multipart())[1])
            assert isinstance(refusal, messages.Refusal)
            assert "your CURVE key is no longer in our curve_peers_dir" in refusal.reason
    assert statistics.answered == 1


async def test_who_has_left_the_allowlist_is_refused_over_a_kept_connection_too(keys: Path) -> None:
    clock = ManualClock()
    async with listening(config_of(keys, "producer"), clock) as listener:
        with asking(config_of(keys, "reader")) as channel:
            assert await channel.ask(to(address_of(listener)), fingerprint=b"") == ANSWER
            (keys / "reader.public").unlink()
            clock.advance(2)
            reply = await channel.ask(to(address_of(listener)), fingerprint=b"")
            assert isinstance(reply, messages.Refusal)
            assert "your CURVE key is no longer in our curve_peers_dir" in reply.reason
            assert not reply.transient


async def _pair(keys: Path, name: str) -> KeyPair:
    return (await Keyring.read(name, keys / f"{name}.secret", keys, ManualClock().now_s)).own_keys


async def test_a_runtime_with_bad_keys_does_not_open_and_leaves_nothing(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = replace(config_of(keys, "producer", secret_of="reader"), listen=f"tcp://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=r"producer\.public does not belong to .*reader\.secret"):
        async with Runtime(config):
            pass
    with socket.create_server(("127.0.0.1", port)):
        pass
