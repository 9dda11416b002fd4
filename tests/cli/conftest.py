"""Fixtures of the tests of commands."""

import sys

import pytest

from bilevel.cli import main


@pytest.fixture
def mistake(tmp_path, monkeypatch, capfd):
    """Return the message of a command that ends with status 2 and leaves no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def message(line):
        before = sorted(tmp_path.rglob("*"))
        assert main(line.split() if isinstance(line, str) else line) == 2
        assert sorted(tmp_path.rglob("*")) == before
        (error,) = capfd.readouterr().err.splitlines()
        assert error.startswith("bilevel: ")
        return error.removeprefix("bilevel: ")

    return message
