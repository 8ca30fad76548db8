"""The example server's launcher: processes that do not start, or die, and taken ports. What it starts are scripts."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai_server import launcher
from openai_server.command import main
from openai_server.launcher import HEALTH_TIMEOUT, Keeper, ServiceSettings, start_service
from openai_server.starts import CANNOT_START, CannotListenError, StartError, Starts, listen_at
from tiny_model import Model

HERE = "127.0.0.1"

# What the launcher starts instead of workers. It notes its starts, and answers that it is well.
CHILD = """
import http.server, json, os, pathlib, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"pid": os.getpid(), "status": "ok"}).encode())

    def log_message(self, *_):
        pass

def server(port):
    return http.server.HTTPServer(("127.0.0.1", port), Handler)

here = pathlib.Path(__file__).parent
(here / f"{os.getpid()}.pid").touch()
"""

# It answers once if it is to work before it ends.
DYING = """
status, working_starts, port = map(int, sys.argv[1:4])
if len(list(here.glob("*.pid"))) <= working_starts:
    server(port).handle_request()
sys.exit(status)
"""

# It answers until it is told to end. The one whose role is in the file `hopeless` cannot start, and says so when the
# three others run.
SERVING = f"""
if (here / "hopeless").exists() and (here / "hopeless").read_text() == sys.argv[1]:
    (here / f"{{os.getpid()}}.pid").unlink()
    while len(list(here.glob("*.pid"))) < 3:
        pass
    sys.exit({CANNOT_START})
server(int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
"""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens at."""
    with closing(listen_at(HERE, 0)) as listening:
        yield int(listening.getsockname()[1])


class TestPorts:
    @pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
    def test_a_host_that_is_not_here_is_named(self, host: str) -> None:
        with pytest.raises(CannotListenError, match=rf"at {host}:8000: .*; choose an address of this machine"):
            listen_at(host, 8000)

    def test_and_a_port_that_is_not_for_everybody(self) -> None:
        error = CannotListenError(HERE, 80, OSError(errno.EACCES, "Permission denied"))
        assert str(error).endswith("127.0.0.1:80: Permission denied; choose a port above 1023 with --port")

    def test_one_whose_last_connection_is_not_quite_gone_is_free(self) -> None:
        with closing(listen_at(HERE, 0)) as listening:
            port = listening.getsockname()[1]
            with socket.create_connection((HERE, port)) as client:
                accepted, _ = listening.accept()
                accepted.close()  # this end closes first: it is the one that waits
                assert client.recv(1) == b""
        listen_at(HERE, port).close()


class TestStarts:
    def test_what_worked_is_started_again_however_often_it_dies_and_what_never_did_a_few_times(self) -> None:
        """Pauses grow in a row of failures, which work ends."""
        starts = Starts()
        assert [starts.ended(1, was_ready=False) for _ in range(3)] == [1.0, 2.0, 4.0]
        for _ in range(20):
            starts.worked()
            assert starts.ended(-9, was_ready=True) == 1.0
        assert [starts.ended(1, was_ready=False) for _ in range(4)] == [1.0, 2.0, 4.0, None]

    def test_what_cannot_start_is_not_tried_again_unless_it_has_worked(self) -> None:
        assert Starts().ended(CANNOT_START, was_ready=False) is None
        starts = Starts()
        starts.worked()
        starts.ended(1, was_ready=True)
        assert [starts.ended(CANNOT_START, was_ready=False) for _ in range(4)] == [1.0, 2.0, 4.0, None]


def left_of(child: Path) -> list[str]:
    """Those that are still there; a dead one that nobody has waited for is."""
    return [path.stem for path in child.parent.glob("*.pid") if Path("/proc", path.stem).exists()]


def starts_of(child: Path) -> int:
    return len(list(child.parent.glob("*.pid")))


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script that the launcher starts."""
    script = tmp_path / "child.py"
    script.write_text(CHILD + DYING)
    monkeypatch.setattr(launcher, "COMMAND", script)
    return script


@pytest.fixture
def hopeless(dying: Path) -> Path:
    dying.write_text(f"raise SystemExit({CANNOT_START})")
    return dying


@pytest.fixture
def serving(dying: Path) -> Path:
    dying.write_text(CHILD + SERVING)
    return dying


async def keep(status: int, working_starts: int = 0) -> None:
    """Keep such a child running until the launcher gives up."""
    with closing(listen_at(HERE, 0)) as listening:
        port = listening.getsockname()[1]
    keeper = Keeper(
        name="decode-0",
        url=f"http://{HERE}:{port}",
        arguments=[str(status), str(working_starts), str(port)],
        starts=Starts(first_pause_s=0.0),
    )
    async with aiohttp.ClientSession(timeout=HEALTH_TIMEOUT) as client:
        await keeper.keep(client)


class TestKeeper:
    async def test_one_that_dies_at_every_start_is_given_up(
        self, dying: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(StartError, match=r"decode-0 died 4 times before it was ready \(exit code 1\)"):
            await keep(1)
        assert starts_of(dying) == 4
        assert capsys.readouterr().err.count("decode-0 died (exit code 1); starting it again in 0 s") == 3

    async def test_one_that_says_that_it_cannot_start_is_given_up_at_once(self, dying: Path) -> None:
        with pytest.raises(StartError, match="decode-0 cannot start; what it says itself is above"):
            await keep(CANNOT_START)
        assert starts_of(dying) == 1

    async def test_one_that_works_and_dies_is_started_again_and_again(self, dying: Path) -> None:
        with pytest.raises(StartError, match="died 4 times"):
            await keep(1, working_starts=5)
        assert starts_of(dying) == 5 + 4

    async def test_another_process_that_answers_at_its_port_is_not_taken_for_it(self, dying: Path) -> None:
        async def health(_: web.Request) -> web.Response:
            return web.json_response({"status": "ok", "pid": 1})

        stranger = web.Application()
        stranger.router.add_get("/health", health)
        async with TestServer(stranger) as server, aiohttp.ClientSession(timeout=HEALTH_TIMEOUT) as client:
            arguments = [str(CANNOT_START), "0", str(server.port)]
            keeper = Keeper(name="router", url=f"http://{HERE}:{server.port}", arguments=arguments)
            assert (await launcher._health(client, keeper.url))["status"] == "ok"
            with pytest.raises(StartError, match="router cannot start"):
                await keeper.keep(client)
        assert not keeper.ready.is_set()


def settings_of(checkpoint: Path, *, host: str = HERE, port: int = 0) -> ServiceSettings:
    return ServiceSettings(prefill=2, decode=1, host=host, port=port, checkpoint=checkpoint, deadline_s=5.0)


class TestService:
    async def test_parts_that_cannot_start_end_it_with_one_error(self, hopeless: Path) -> None:
        with pytest.raises(StartError, match=r"(prefill|decode|router)(-\d)? cannot start"):
            async with start_service(settings_of(hopeless.parent)):
                raise AssertionError("it never becomes ready")

    async def test_when_it_is_left_all_processes_have_ended(self, serving: Path) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with start_service(settings_of(serving.parent)):
                assert starts_of(serving) == 4
                raise LookupError("of whoever uses it")
        assert caught.group_contains(LookupError)
        assert left_of(serving) == []

    async def test_when_a_part_cannot_start_the_others_are_ended_and_waited_for(self, serving: Path) -> None:
        serving.with_name("hopeless").write_text("router")  # once the others run
        with pytest.raises(StartError, match="router cannot start"):
            async with start_service(settings_of(serving.parent)):
                raise AssertionError("it never becomes ready")
        assert starts_of(serving) == 3
        assert left_of(serving) == []

    async def test_a_taken_port_is_known_before_anything_is_started(self, dying: Path, taken: int) -> None:
        with pytest.raises(CannotListenError, match=str(taken)):
            async with start_service(settings_of(dying.parent, port=taken)):
                raise AssertionError("it never becomes ready")
        assert starts_of(dying) == 0

    def test_workers_are_for_the_router_alone_where_it_is_for_everybody(self) -> None:
        service = launcher._laid_out(settings_of(Path(), host="0.0.0.0"))
        assert service.url.startswith("http://0.0.0.0:")
        assert all(url.startswith("http://127.0.0.1:") for url in (service.prefill | service.decode).values())


class TestCommands:
    @pytest.mark.parametrize(
        "words",
        [
            ("serve",),
            ("prefill", "--name", "p"),
            ("router", "--prefill", "p=http://x", "--decode", "d=http://y"),
        ],
        ids=lambda words: words[0],
    )
    def test_a_taken_port_is_said_in_a_line(
        self, tiny: Model, capsys: pytest.CaptureFixture[str], taken: int, words: tuple[str, ...]
    ) -> None:
        code = main([*words, "--port", str(taken), "--checkpoint", str(tiny.checkpoint)])
        assert (code, capsys.readouterr().err) == (
            CANNOT_START,
            f"error: cannot listen at 127.0.0.1:{taken}: Address already in use; "
            "end what listens there, or choose another port with --port\n",
        )

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--port", "70000"), r"argument --port: expected 0 to 65535, got '70000'"),
            (("--checkpoint", "/nowhere"), r"there is no unpacked model in '/nowhere'; the command `unpack` makes one"),
        ],
        ids=["port", "checkpoint"],
    )
    def test_what_cannot_be_right_is_said_before_anything_starts(
        self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["serve", *words])
        assert re.search(message, capsys.readouterr().err)
