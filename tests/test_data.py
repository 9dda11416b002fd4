"""Claims about `bilevel.data`; those about the real files need BILEVEL_DATA and skip without it."""

import csv
import functools
import gzip
import hashlib
import http.server
import io
import lzma
import os
import struct
import tarfile
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from bilevel import data

COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def md5(content):
    return "md5:" + hashlib.md5(content).hexdigest()


def idx_file(array):
    return struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and ". " not in text
    return text


# ---------------------------------------------------------------- small files in the real formats


class Store:
    """A small dataset: `root` stands for $BILEVEL_DATA, `host` for the public host's files."""

    def __init__(self, tmp_path, monkeypatch):
        self.root, self.cache, self.host = (tmp_path / d for d in ("root", "cache", "host"))
        self.host.mkdir()
        self.patch = monkeypatch
        monkeypatch.setenv("BILEVEL_DATA", str(self.root))
        monkeypatch.setattr(data.pooch, "os_cache", lambda _: self.cache)
        monkeypatch.setattr(data, "BATCH_ROWS", 4)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        self.url = "http://127.0.0.1:1"  # nothing listens there

    def sources(self, name, *sources):
        sources = tuple(
            data.Source(f"{self.url}/{file}", md5(content), files)
            for file, content, files in sources
        )
        for (file, content, _) in self.published:
            (self.host / file).write_bytes(content)
        self.patch.setitem(data.SOURCES, name, sources)

    def publish(self, name, *published):
        self.published = published
        self.sources(name, *published)

    def put(self, name, file, content, place=None):
        path = (place or self.root) / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


@pytest.fixture
def store(tmp_path, monkeypatch):
    return Store(tmp_path, monkeypatch)
