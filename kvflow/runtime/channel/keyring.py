"""CURVE key files: an engine's own key pair, and a folder with the public keys of the peers that it accepts.

All ranks of an engine `prefill-0` have the file `prefill-0.secret`; its peers have `prefill-0.public`. A key file has
one line of 40 characters (Z85); lines that begin with "# " are comments. Only the name of a public key file ties the
key to an engine, so write access to the folder is enough to impersonate any engine.

A lookup reads the folder again if the last reading is more than a second old, so engines join, leave and change keys
without a restart. If the folder cannot be read, the keys of the last reading stay valid. Error messages never show a
secret.
"""

from __future__ import annotations

import asyncio
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import zmq
from zmq.utils import z85

from kvflow import threads
from kvflow.checks import counted
from kvflow.config import is_key_name
from kvflow.errors import ConfigError
from kvflow.logs import logger_of

logger = logger_of(__name__)

_SECRET_SUFFIX, _PUBLIC_SUFFIX = ".secret", ".public"
_KEY_CHARS = 40
_FILE_BYTES_MAX = 4096
_FILES_MAX = 1 << 14
_REREAD_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A public and a secret CURVE key, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


class _Allowlist(NamedTuple):
    """The public keys of accepted engines: `keys` maps engine ids to keys, `engines` maps keys to engine ids."""

    keys: dict[str, bytes]
    engines: dict[bytes, str]


class Keyring:
    """The key pair of this engine, and the public keys of the engines that it accepts."""

    def __init__(self, own_keys: KeyPair, folder: Path, allowlist: _Allowlist, now_s: Callable[[], float]) -> None:
        self.own_keys = own_keys
        self.folder = folder
        self._allowlist = allowlist
        self._now_s = now_s
        self._read_at_s = now_s()

    @classmethod
    async def read(cls, engine_id: str, secret_file: Path, folder: Path, now_s: Callable[[], float]) -> Self:
        """Return a `Keyring` with the key pair in `secret_file` and the public keys of peers in `folder`.

        The files are read in a thread. ConfigError, which names the file, if one is faulty, or if `folder` has a public
        key for `engine_id` other than that in `secret_file`.
        """
        with threads.starting(f"curve_secret_key_file: {secret_file}"):
            own_keys = await asyncio.to_thread(_read_pair, secret_file)
            allowlist = await asyncio.to_thread(_read_allowlist, folder)
        if allowlist.keys.get(engine_id, own_keys.public) != own_keys.public:
            raise ConfigError(
                f"curve_peers_dir: {folder / (engine_id + _PUBLIC_SUFFIX)} does not belong to {secret_file}"
            )
        return cls(own_keys, folder, allowlist, now_s)

    async def key_of(self, engine_id: str) -> bytes | None:
        """Return the public key of engine `engine_id`, or None if the folder has no key file of that name."""
        await self._refresh()
        return self._allowlist.keys.get(engine_id)

    async def engine_of(self, key: bytes) -> str | None:
        """Return the id of the engine that owns the public key `key`, or None if no file in the folder has that key."""
        await self._refresh()
        return self._allowlist.engines.get(key)

    async def _refresh(self) -> None:
        """If the folder was last read more than `_REREAD_AFTER_S` ago, read it again.

        While a lookup reads the folder, other lookups use the old keys.
        """
        now_s = self._now_s()
        if now_s - self._read_at_s < _REREAD_AFTER_S:
            return
        self._read_at_s = now_s
        try:
            with threads.starting("reading the keys"):
                self._allowlist = await asyncio.to_thread(_read_allowlist, self.folder)
        except ConfigError as error:
            logger.error("curve_peers_dir %s cannot be read, the keys read last stay valid: %s", self.folder, error)


def make_key_files(folder: Path, name: str) -> tuple[Path, Path]:
    """Create a key pair and write it to `NAME.secret` and `NAME.public` in `folder`. Return both paths in that order.

    Never overwrites a file. Raises ConfigError if `name` cannot name a key file, or a file exists or cannot be written.
    """
    if not is_key_name(name):
        raise ConfigError(f"name: {name[:80]!r} cannot be the name of a key file")
    public, secret = zmq.curve_keypair()
    files = folder / (name + _SECRET_SUFFIX), folder / (name + _PUBLIC_SUFFIX)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_new(files[1], f"# Public key of the kvflow engine {name}\n{public.decode()}\n", 0o644)
        try:
            _write_new(files[0], f"# SECRET key of the kvflow engine {name}\n{secret.decode()}\n", 0o600)
        except OSError:
            files[1].unlink()
            raise
    except OSError as error:
        raise ConfigError(f"cannot write a key: {error}") from error
    return files


def _write_new(file: Path, text: str, mode: int) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as stream:
        stream.write(text)


def _read_pair(file: Path) -> KeyPair:
    what = "curve_secret_key_file"
    _check_mode(file, stat.S_IRWXO | stat.S_IWGRP, what)
    secret = _read_key(file, what)
    return KeyPair(public=z85.decode(zmq.curve_public(z85.encode(secret))), secret=secret)


def _read_allowlist(folder: Path) -> _Allowlist:
    what = "curve_peers_dir"
    _check_mode(folder, stat.S_IWOTH, what)
    keys: dict[str, bytes] = {}
    engines: dict[bytes, str] = {}
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == _PUBLIC_SUFFIX and file.stem)
    except OSError as error:
        raise ConfigError(f"{what}: {error}") from error
    if len(files) > _FILES_MAX:
        raise ConfigError(f"{what}: {folder} has {counted(len(files), 'public key')}, at most {_FILES_MAX}")
    for file in files:
        key = keys[file.stem] = _read_key(file, what)
        if engines.setdefault(key, file.stem) != file.stem:
            raise ConfigError(f"{what}: {folder}: {engines[key]}{_PUBLIC_SUFFIX} and {file.name} hold the same key")
    return _Allowlist(keys, engines)


def _check_mode(path: Path, forbidden: int, what: str) -> None:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"{what}: {error}") from error
    if mode & forbidden:
        raise ConfigError(f"{what}: {path} is open to too many users: mode {mode:04o}, try {mode & ~forbidden:04o}")


def _read_key(file: Path, what: str) -> bytes:
    """Return the 32-byte key in `file`. ConfigError, without the content, if `file` is not exactly one key.

    `what`: the setting that leads to `file`, for errors.
    """
    try:
        with open(file, "rb") as stream:
            content = stream.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{what}: {error}") from error
    lines = [line.strip() for line in content.splitlines() if line.strip() and not line.startswith(b"# ")]
    if len(content) > _FILE_BYTES_MAX or len(lines) != 1 or len(lines[0]) != _KEY_CHARS:
        length = counted(len(content), "byte")
        raise ConfigError(f"{what}: {file}: expected one key of {_KEY_CHARS} characters, {length} found")
    try:
        return z85.decode(lines[0])
    except (KeyError, struct.error):
        raise ConfigError(f"{what}: {file}: its {_KEY_CHARS} characters are not a Z85 key") from None
