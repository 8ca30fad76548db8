"""Key files: accepted files, refused files and their errors, and when the folder is read again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvflow.errors import ConfigError
from kvflow.runtime.channel.keyring import Keyring, make_key_files
from kvflow.testing import ManualClock


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    for name in ("ours", "theirs"):
        make_key_files(folder, name)
    return folder


def read(folder: Path, clock: ManualClock | None = None, *, engine_id: str = "ours") -> Keyring:
    return asyncio.run(Keyring.read(engine_id, folder / "ours.secret", folder, (clock or ManualClock()).now_s))


def test_what_was_made_is_read(keys: Path) -> None:
    keyring = read(keys)
    theirs = asyncio.run(Keyring.read("theirs", keys / "theirs.secret", keys, ManualClock().now_s))
    assert keyring.own_keys.public != theirs.own_keys.public
    assert asyncio.run(keyring.key_of("theirs")) == theirs.own_keys.public
    assert asyncio.run(keyring.engine_of(theirs.own_keys.public)) == "theirs"
    assert asyncio.run(keyring.engine_of(bytes(32))) is None


def test_files_are_as_private_as_they_should_be(keys: Path) -> None:
    assert (keys / "ours.secret").stat().st_mode & 0o777 == 0o600
    assert (keys / "ours.secret").read_text().splitlines()[1] not in repr(read(keys).own_keys)


def test_nothing_is_overwritten(keys: Path) -> None:
    (keys / "ours.public").unlink()
    before = (keys / "ours.secret").read_text()
    with pytest.raises(ConfigError, match=r"cannot write a key: .*ours\.secret"):
        make_key_files(keys, "ours")
    assert (keys / "ours.secret").read_text() == before
    assert not (keys / "ours.public").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", ".hidden", "a b", "x" * 101, "a\0b", "-n"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name: "):
        make_key_files(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine_id", ["../keys/theirs", "theirs.public", "", "/etc/passwd", "nobody"])
def test_names_from_outside_never_become_paths(keys: Path, engine_id: str) -> None:
    assert asyncio.run(read(keys).key_of(engine_id)) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected one key of 40 characters, 0 bytes found"),
        ("# only a comment\n", "expected one key"),
        ("x" * 39, "expected one key of 40 characters, 39 bytes found"),
        ("x" * 40 + "\n" + "y" * 40, "expected one key"),
        ("x" * 100_000, "4097 bytes found"),
        ("\u00e4" * 20, "are not a Z85 key"),
        ("#" * 40, "are not a Z85 key"),  # no 32 bits are that large
    ],
)
@pytest.mark.parametrize("file", ["ours.secret", "theirs.public"])
def test_a_file_that_holds_no_key_is_named_and_not_shown(keys: Path, file: str, content: str, message: str) -> None:
    (keys / file).write_text(content)
    setting = "curve_secret_key_file" if file.endswith("secret") else "curve_peers_dir"
    with pytest.raises(ConfigError, match=rf"^{setting}: .*{file}.*{message}") as caught:
        read(keys)
    assert "xxx" not in str(caught.value)


@pytest.mark.parametrize(("path", "mode"), [("ours.secret", 0o604), ("ours.secret", 0o660), (".", 0o777)])
def test_what_too_many_users_can_open_is_refused(keys: Path, path: str, mode: int) -> None:
    (keys / path).chmod(mode)
    with pytest.raises(ConfigError, match=rf"open to too many users: mode {mode:04o}"):
        read(keys)


def test_a_group_may_read_the_secret_key(keys: Path) -> None:
    """As containers mount it for a user that does not own it."""
    (keys / "ours.secret").chmod(0o440)
    read(keys)


@pytest.mark.parametrize("missing", ["ours.secret", "."])
def test_what_is_missing_is_named(keys: Path, missing: str) -> None:
    if missing == ".":
        keys.rename(keys.parent / "elsewhere")
    else:
        (keys / missing).unlink()
    with pytest.raises(ConfigError, match=r"curve_secret_key_file: .*No such file"):
        read(keys)


def test_a_key_has_one_owner(keys: Path) -> None:
    (keys / "twin.public").write_text((keys / "theirs.public").read_text())
    with pytest.raises(ConfigError, match=r"theirs\.public and twin\.public hold the same key"):
        read(keys)


def test_our_own_public_key_has_to_be_ours(keys: Path) -> None:
    with pytest.raises(ConfigError, match=r"theirs\.public does not belong to .*ours\.secret"):
        read(keys, engine_id="theirs")


def test_the_folder_is_read_again_after_a_second(keys: Path) -> None:
    clock = ManualClock()
    keyring = read(keys, clock)
    make_key_files(keys, "newcomer")
    (keys / "theirs.public").unlink()
    clock.advance(0.9)
    assert asyncio.run(keyring.key_of("newcomer")) is None
    assert asyncio.run(keyring.key_of("theirs")) is not None
    clock.advance(0.2)
    assert asyncio.run(keyring.key_of("newcomer")) is not None
    assert asyncio.run(keyring.key_of("theirs")) is None


def test_a_folder_that_breaks_leaves_the_keys_as_they_were(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    keyring = read(keys, clock)
    (keys / "half-written.public").write_text("x")
    clock.advance(2)
    assert asyncio.run(keyring.key_of("theirs")) is not None
    assert "cannot be read, the keys read last stay valid: curve_peers_dir: " in caplog.text
    make_key_files(keys, "newcomer")
    (keys / "half-written.public").unlink()
    clock.advance(2)
    assert asyncio.run(keyring.key_of("newcomer")) is not None
