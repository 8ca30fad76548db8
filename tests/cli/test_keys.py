"""`kvflow keys new`: two files, and the lines that use them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from kvflow import Config
from kvflow.cli.app import app
from kvflow.runtime.channel.keyring import Keyring


def test_the_config_that_it_prints_works(tmp_path: Path) -> None:
    for name in ("prefill-0", "decode-0"):
        done = CliRunner().invoke(app, ["keys", "new", str(tmp_path / "keys"), "--name", name])
        assert done.exit_code == 0, done.output
    made: list[Config] = []
    exec(done.stdout.replace("...,", ""), {"Config": lambda **values: made.append(Config(**values))})
    (config,) = made
    assert config.engine_id == "decode-0"
    assert config.curve_secret_key_file is not None
    assert config.curve_peers_dir is not None
    keyring = asyncio.run(
        Keyring.read("decode-0", Path(config.curve_secret_key_file), Path(config.curve_peers_dir), lambda: 0.0)
    )
    assert asyncio.run(keyring.key_of("prefill-0")) is not None
    assert "prefill-0" not in done.stderr
    assert str(tmp_path / "keys" / "decode-0.public") in done.stderr


def test_it_says_why_it_cannot(tmp_path: Path) -> None:
    command = ["keys", "new", str(tmp_path), "--name", "prefill-0"]
    CliRunner().invoke(app, command)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "File exists" in done.stderr
    done = CliRunner().invoke(app, [*command[:3], "--name", "../up"])
    assert done.exit_code == 1
    assert "'../up' cannot be the name of a key file" in done.stderr
