"""Fixtures of the tests of commands."""

import sys

import pytest

from bilevel.cli import main


@pytest.fixture
def mistake(tmp_path, monkeypatch, capfd):
    """A function of a command's line that returns the one message of its exit with status 2.

    The command runs in ``tmp_path``, and leaves nothing there.
    """
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
