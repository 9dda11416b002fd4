"""Tests of `bilevel.data`; those on the real files need $BILEVEL_DATA."""

import csv
import gc
import gzip
import hashlib
import io
import itertools
import lzma
import os
import re
import struct
import tarfile
import threading
import warnings
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from generated import examples, seeds
from hypothesis import given
from sklearn.datasets import load_digits

from bilevel.data import datasets

REAL = os.environ.get("BILEVEL_DATA", "")
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
RNG = np.random.RandomState(0)


def real(name):
    present = REAL and (Path(REAL) / name).is_dir()
    return pytest.mark.skipif(not present, reason=f"BILEVEL_DATA holds no {name}")


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


IMAGES = RNG.randint(0, 256, (9, 5, 4), np.uint8)
LABELS = RNG.randint(0, 10, 9).astype(np.uint8)
MNIST = {
    "train-images-idx3-ubyte": idx(IMAGES[:6]),
    "train-labels-idx1-ubyte": idx(LABELS[:6]),
    "t10k-images-idx3-ubyte": idx(IMAGES[6:]),
    "t10k-labels-idx1-ubyte": idx(LABELS[6:]),
}

RECORDS = RNG.randint(0, 256, (6, 4, 3073), np.uint8)
RECORDS[:, :, 0] %= 10
BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
CIFAR = {file: batch.tobytes() for file, batch in zip(BATCHES, RECORDS, strict=True)}

TEXTS = ["plain", 'a "quoted", one', "two<br />\nlines", "d\u00e9j\u00e0 vu \u2014 \u6620\u753b"]
REVIEWS = {
    f"aclImdb/{part}/{label}/{i}_{rating}.txt": f"{part} {label} {i}: {text}".encode()
    for part in ("train", "test")
    for label, rating in (("neg", 2), ("pos", 9))
    for i, text in enumerate(TEXTS * 3)  # numbers of two digits do not sort by name
}
UNLABELLED = {"aclImdb/train/unsup/0_0.txt": b"no label", "aclImdb/README": b"about"}


def reviews_csv():
    table = io.StringIO(newline="")
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["split", "label", "rating", "review_id", "text"])
    for path, text in REVIEWS.items():
        part, label, number, rating = re.split(r"[/_.]", path)[1:5]
        rows.writerow([part, int(label == "pos"), rating, number, text.decode()])
    return table.getvalue().encode()


def tar(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


CIFAR_TAR = tar({f"cifar-10-batches-bin/{file}": content for file, content in CIFAR.items()})
IMDB_TAR = tar(REVIEWS | UNLABELLED)


def digest(content, algorithm="md5"):
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


TABLE = reviews_csv()
PLAIN = {"mnist": MNIST, "cifar10": CIFAR, "imdb": {"imdb_reviews.csv": TABLE}}
CIFAR_ARCHIVE, IMDB_ARCHIVE = "cifar-10-binary.tar.gz", "aclImdb_v1.tar.gz"
REMOTE = {f"{file}.gz": gzip.compress(content, mtime=0) for file, content in MNIST.items()}
REMOTE |= {CIFAR_ARCHIVE: CIFAR_TAR, IMDB_ARCHIVE: IMDB_TAR}


def sources(host):
    """Return the table of sources with the digests of the small files, on another host."""

    def source(file, files):
        return datasets.Source(f"{host}/{file}", digest(REMOTE[file]), files)

    reviews = digest(TABLE, "sha256")
    cifar = {file: digest(content) for file, content in CIFAR.items()}
    return {
        "mnist": tuple(source(f"{file}.gz", {file: digest(MNIST[file])}) for file in MNIST),
        "cifar10": (source(CIFAR_ARCHIVE, cifar),),
        "imdb": (source(IMDB_ARCHIVE, {"imdb_reviews.csv": reviews, "aclImdb": reviews}),),
    }


def write(folder, files, suffix=""):
    for name, content in files.items():
        path = folder / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(COMPRESS[suffix](content))


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Provide empty folders for $BILEVEL_DATA and the user cache, and a dead host."""
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "given"))
    monkeypatch.setattr(datasets.pooch, "os_cache", lambda project: tmp_path / "cache")
    monkeypatch.setattr(datasets, "BATCH_ROWS", 4)
    monkeypatch.setattr(datasets, "SOURCES", sources("http://127.0.0.1:9"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return SimpleNamespace(given=tmp_path / "given", cache=tmp_path / "cache")


@pytest.fixture
def host(places, tmp_path, monkeypatch):
    """Serve a folder on this machine, and record the requested paths."""
    folder, asked = tmp_path / "host", []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path.lstrip("/"))

    write(folder, REMOTE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    monkeypatch.setattr(datasets, "SOURCES", sources(f"http://127.0.0.1:{server.server_port}"))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield SimpleNamespace(folder=folder, asked=asked)
    server.shutdown()
    server.server_close()


def refusal(error, name, **options):
    """Return the error message of loading, which is one sentence."""
    with pytest.raises(error) as caught:
        datasets.load(name, **options)
    message = str(caught.value)
    assert "\n" not in message and ". " not in message, message
    return message


def same(a, b):
    return a.classes == b.classes and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a[:4], b[:4], strict=True)
    )


def test_digits_are_the_scikit_learn_digits_with_the_last_360_as_test():
    digits, truth = datasets.load("digits"), load_digits()
    np.testing.assert_array_equal(np.r_[digits.x_train, digits.x_test] * 16, truth.images)
    np.testing.assert_array_equal(np.r_[digits.y_train, digits.y_test], truth.target)
    assert len(digits.y_test) == 360
    assert digits.x_train.dtype == np.float32 and digits.y_train.dtype == np.int32
    assert set(digits.y_test) == set(range(len(digits.classes)))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_idx_files_are_read_however_they_are_compressed(places, suffix):
    write(places.given / "mnist", MNIST, suffix)
    mnist = datasets.load("mnist")
    x, y = np.concatenate([mnist.x_train, mnist.x_test]), np.r_[mnist.y_train, mnist.y_test]
    np.testing.assert_array_equal(np.rint(x * 255), IMAGES)
    np.testing.assert_array_equal(y, LABELS)
    assert len(mnist.x_train) == len(mnist.y_train) == 6
    assert x.dtype == np.float32 and y.dtype == np.int32


@pytest.mark.parametrize("suffix", COMPRESS)
def test_cifar_planes_become_the_channels_of_images_in_batch_order(places, suffix):
    write(places.given / "cifar10", CIFAR, suffix)
    cifar = datasets.load("cifar10")
    assert cifar.x_train.shape == (20, 32, 32, 3) and cifar.x_test.shape == (4, 32, 32, 3)
    np.testing.assert_array_equal(cifar.y_train, RECORDS[:5, :, 0].ravel())
    for row, column, channel in ((0, 0, 0), (0, 7, 1), (31, 2, 2)):
        pixels = np.rint(255 * cifar.x_train[:, row, column, channel])
        byte = 1 + 1024 * channel + 32 * row + column
        np.testing.assert_array_equal(pixels, RECORDS[:5, :, byte].ravel())
    assert cifar.x_train.dtype == np.float32 and cifar.x_train.flags.c_contiguous


def test_reviews_are_whole_texts_of_type_str_with_their_own_labels(places):
    write(places.given / "imdb", PLAIN["imdb"], ".gz")
    imdb, first = datasets.load("imdb"), datasets.load("imdb", train_size=8, test_size=8)
    # The file is sorted, and the first reviews have both labels.
    assert set(first.y_train) == set(first.y_test) == {0, 1}
    texts = {text.decode(): path.split("/")[1:3] for path, text in REVIEWS.items()}
    for part, x, y in (("train", imdb.x_train, imdb.y_train), ("test", imdb.x_test, imdb.y_test)):
        assert sorted(x) == sorted(text for text in texts if texts[text][0] == part)
        for text, label in zip(x, y, strict=True):
            assert type(text) is str and texts[text] == [part, ("neg", "pos")[label]]
    assert imdb.y_train.dtype == np.int32


@pytest.mark.parametrize(
    ("name", "files", "suffix"),
    [
        ("cifar10", {CIFAR_ARCHIVE: CIFAR_TAR}, ""),
        ("imdb", {IMDB_ARCHIVE: IMDB_TAR}, ""),
        ("imdb", REVIEWS | UNLABELLED, ""),
        ("imdb", PLAIN["imdb"], ".xz"),
    ],
    ids=["cifar archive", "reviews archive", "reviews folder", "reviews table"],
)
def test_every_form_of_a_dataset_holds_the_same_rows(places, monkeypatch, name, files, suffix):
    write(places.given / name, PLAIN[name])
    expected = datasets.load(name)
    monkeypatch.setenv("BILEVEL_DATA", str(places.given / "other"))
    write(places.given / "other" / name, files, suffix)
    assert same(datasets.load(name), expected)


@pytest.mark.parametrize("name", ["digits", "mnist", "cifar10", "imdb"])
def test_smaller_sizes_keep_the_first_rows_and_larger_ones_are_refused(places, name):
    write(places.given / name, PLAIN.get(name, {}))
    whole, few = datasets.load(name), datasets.load(name, train_size=5, test_size=2)
    parts = {name: getattr(whole, name)[:5] for name in ("x_train", "y_train")}
    parts |= {name: getattr(whole, name)[:2] for name in ("x_test", "y_test")}
    assert same(few, whole._replace(**parts))
    rows = len(whole.y_train)
    message = refusal(ValueError, name, train_size=rows + 1)
    assert str(rows) in message and str(rows + 1) in message
    assert "test_size" in refusal(ValueError, name, test_size=10**6)
    assert "train_size: expected at least 1, got 0" in refusal(ValueError, name, train_size=0)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_truncated_or_damaged_idx_file_is_refused(places, suffix):
    write(places.given / "mnist", MNIST, suffix)
    path = places.given / "mnist" / f"train-images-idx3-ubyte{suffix}"
    whole = path.read_bytes()
    damaged = [whole[:length] for length in (0, 3, 7, len(whole) // 2, len(whole) - 1)]
    for position in (0, 20, -6):  # the magic number, the stream, the checksum
        altered = bytearray(whole)
        altered[position] ^= 255
        damaged.append(bytes(altered))
    for content in damaged:
        path.write_bytes(content)
        message = refusal(ValueError, "mnist")
        assert str(path) in message and "expected" in message and "got" in message


TRAIN_IMAGES, TEST_LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
BATCH = "test_batch.bin"
ALTERED = MNIST[TRAIN_IMAGES][:-1] + bytes([MNIST[TRAIN_IMAGES][-1] ^ 1])
LONGER = MNIST[TEST_LABELS][:7] + b"\xc8" + MNIST[TEST_LABELS][8:]
SHORT, ARCHIVE = CIFAR[BATCH][:-1], {CIFAR_ARCHIVE: CIFAR_TAR[:-20]}
REVIEW = {"aclImdb/test/pos/3_9.txt": b"another review"}
# A dataset, its damaged files, and words of the message.
DAMAGED = [
    (
        *("mnist", MNIST | {TRAIN_IMAGES: ALTERED}),
        (TRAIN_IMAGES, digest(MNIST[TRAIN_IMAGES])[4:], digest(ALTERED)[4:]),
    ),
    ("mnist", MNIST | {TEST_LABELS: LONGER}, (TEST_LABELS, "208", "11")),
    ("cifar10", CIFAR | {BATCH: SHORT}, (BATCH, str(len(CIFAR[BATCH])), "got 12291")),
    ("cifar10", ARCHIVE, (CIFAR_ARCHIVE, digest(CIFAR_TAR)[4:])),
    ("imdb", REVIEWS | REVIEW, ("aclImdb", digest(TABLE, "sha256")[7:])),
]


@pytest.mark.parametrize(("name", "files", "words"), DAMAGED)
def test_damaged_files_are_refused_with_what_was_expected(places, name, files, words):
    write(places.given / name, files)
    message = refusal(ValueError, name)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("name", "file"), [("mnist", TEST_LABELS), ("cifar10", BATCHES[0]), ("cifar10", BATCH)]
)
def test_a_missing_file_is_named_and_not_taken_from_elsewhere(places, host, name, file):
    files = PLAIN[name]
    write(places.given / name, {other: files[other] for other in files if other != file})
    write(places.cache / name, files)
    message = refusal(FileNotFoundError, name, train_size=4)
    assert file in message and str(places.given / name) in message
    assert not host.asked


def test_cifar_reads_no_batch_beyond_those_it_needs_and_asks_for_those_there(places):
    write(places.given / "cifar10", CIFAR | {"data_batch_3.bin": b"damaged"})
    labels = datasets.load("cifar10", train_size=8).y_train
    np.testing.assert_array_equal(labels, RECORDS[:2, :, 0].ravel())
    assert "data_batch_3.bin" in refusal(ValueError, "cifar10", train_size=9)
    write(places.given / "cifar10", CIFAR)
    for missing in BATCHES[3:5]:
        (places.given / "cifar10" / missing).unlink()
    message = refusal(ValueError, "cifar10")
    assert "got 12 of 20" in message and "ask for at most 12" in message
    assert str(places.given / "cifar10") in message
    assert len(datasets.load("cifar10", train_size=12).y_train) == 12


def test_the_folder_named_by_bilevel_data_comes_before_the_cache(places, monkeypatch):
    write(places.given / "mnist", MNIST)
    write(places.cache / "mnist", {file: b"damaged" for file in MNIST})
    assert len(datasets.load("mnist").y_train) == 6
    write(places.cache / "cifar10", CIFAR, ".xz")
    assert len(datasets.load("cifar10").y_train) == 20
    monkeypatch.delenv("BILEVEL_DATA")
    assert len(datasets.load("cifar10").y_train) == 20


def test_without_download_the_message_says_where_a_dataset_was_sought(places, host):
    message = refusal(FileNotFoundError, "mnist", download=False)
    assert str(places.given / "mnist") in message and str(places.cache / "mnist") in message
    assert not host.asked


def homeless(project):
    raise RuntimeError("could not determine the home directory for '~/.cache'")


@pytest.mark.parametrize("cache", [homeless, lambda project: Path("~/.cache", project)])
def test_without_a_home_only_bilevel_data_is_searched(places, host, tmp_path, monkeypatch, cache):
    monkeypatch.setattr(datasets.pooch, "os_cache", cache)
    monkeypatch.chdir(tmp_path)
    message = refusal(FileNotFoundError, "mnist")
    assert f"expected its files in {places.given / 'mnist'}, got none" in message
    monkeypatch.delenv("BILEVEL_DATA")
    assert "this user has no home" in refusal(FileNotFoundError, "mnist")
    assert not host.asked and not Path("~").exists()


@pytest.mark.parametrize("name", ["mnist", "cifar10", "imdb"])
def test_a_dataset_is_downloaded_once_into_the_cache(places, host, name):
    fetched = datasets.load(name)
    files = {source.file for source in datasets.SOURCES[name]}
    assert sorted(host.asked) == sorted(files)
    assert {path.name for path in (places.cache / name).iterdir()} == files
    assert same(datasets.load(name), fetched) and len(host.asked) == len(files)
    write(places.given / name, PLAIN[name])
    assert same(datasets.load(name), fetched)


def test_an_interrupted_download_is_completed(places, host):
    first, later = list(MNIST)[:2], list(MNIST)[2:]
    write(places.cache / "mnist", {file: MNIST[file] for file in first}, ".gz")
    assert len(datasets.load("mnist").y_test) == 3
    assert sorted(host.asked) == [f"{file}.gz" for file in later]


def test_a_download_with_another_digest_is_refused_and_not_kept(places, host):
    write(host.folder, {CIFAR_ARCHIVE: b"something else"})
    message = refusal(ValueError, "cifar10")
    for part in (CIFAR_ARCHIVE, digest(CIFAR_TAR), digest(b"something else")[4:]):
        assert part in message
    assert not list((places.cache / "cifar10").iterdir())


def test_a_file_that_the_host_lacks_is_refused_with_its_address(places, host):
    (host.folder / IMDB_ARCHIVE).unlink()
    with warnings.catch_warnings():
        # pooch leaves the response of a failed request to the garbage collector, which warns.
        warnings.simplefilter("ignore", ResourceWarning)
        message = refusal(FileNotFoundError, "imdb")
        gc.collect()
    assert datasets.SOURCES["imdb"][0].url in message and "HTTPError" in message


def test_an_unreachable_host_is_refused_with_where_to_put_the_file(places):
    message = refusal(FileNotFoundError, "mnist")
    for part in (f"{TRAIN_IMAGES}.gz", str(places.cache / "mnist"), "BILEVEL_DATA"):
        assert part in message


def test_every_source_is_on_https_and_has_digests_so_that_no_download_goes_unchecked():
    pattern = re.compile(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}")
    for source in itertools.chain(*datasets.SOURCES.values()):
        assert source.files and source.url.startswith("https://")
        for value in (source.digest, *source.files.values()):
            assert pattern.fullmatch(value)


def table(labels, parts):
    """Samples of each class in each part."""
    return np.array([[np.sum(labels[part] == c) for c in np.unique(labels)] for part in parts])


@examples(60)
@given(seed=seeds)
def test_parts_have_their_sizes_and_are_disjoint_and_within_one_of_the_ideal(seed):
    rng = np.random.RandomState(seed)
    n, classes = rng.randint(1, 200), rng.randint(1, 12)
    labels = rng.choice(classes, n, p=rng.dirichlet(np.ones(classes)))
    cuts = np.unique(rng.randint(1, n + 1, rng.randint(1, 7)))
    sizes = np.diff(cuts, prepend=0)
    parts = datasets.stratified_split(jax.random.key(seed), labels, sizes)
    assert [len(part) for part in parts] == list(sizes)
    indices = np.concatenate(parts)
    assert len(set(indices)) == len(indices) and set(indices) <= set(range(n))
    ideal = np.outer(sizes, np.unique(labels, return_counts=True)[1]) / n
    assert np.abs(table(labels, parts) - ideal).max() < 1


def test_a_key_always_gives_the_same_parts():
    for key in jax.random.key(0), jax.random.PRNGKey(0):
        train, valid = datasets.stratified_split(key, [0, 1] * 5, (6, 2))
        assert (train.tolist(), valid.tolist()) == ([3, 7, 6, 4, 1, 0], [2, 5])
    other, _ = datasets.stratified_split(jax.random.key(1), [0, 1] * 5, (6, 2))
    assert not np.array_equal(other, train)


def test_no_class_and_no_sample_is_favoured():
    labels, drawn, of_class = np.repeat(np.arange(8), 5), 0, np.zeros(12)
    for seed in range(400):
        key = jax.random.key(seed)
        drawn = drawn + table(labels, datasets.stratified_split(key, labels, (2, 2)))
        of_class[datasets.stratified_split(key, [0] * 4 + [1] * 8, (3,))[0]] += 1
    # Each entry is binomial with mean 100 and deviation below 10.
    for counts in drawn, of_class:
        assert counts.min() > 50 and counts.max() < 150


TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
# The mean, the standard deviation, and the numbers of samples of each class.
PUBLISHED = {
    "mnist": (0.1307, 0.3081, TRAIN, TEST),
    "fashion-mnist": (0.2860, 0.3530, [6000] * 10, [1000] * 10),
}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=real(name)) for name in PUBLISHED])
def test_real_idx_sets_have_their_published_statistics(name):
    mean, deviation, train, test = PUBLISHED[name]
    loaded = datasets.load(name, download=False)
    assert loaded.x_train.shape == (60_000, 28, 28) and loaded.x_test.shape == (10_000, 28, 28)
    assert np.bincount(loaded.y_train).tolist() == train
    assert np.bincount(loaded.y_test).tolist() == test
    assert abs(loaded.x_train.mean(dtype=np.float64) - mean) < 5e-5
    assert abs(loaded.x_train.std(dtype=np.float64) - deviation) < 5e-5
    assert loaded.x_train.max() == 1 and loaded.x_train.min() == 0


@pytest.mark.long
@real("cifar10")
def test_the_first_real_cifar_batch_is_near_the_published_statistics_of_all_five():
    cifar = datasets.load("cifar10", train_size=10_000, download=False)
    assert cifar.x_train.shape == cifar.x_test.shape == (10_000, 32, 32, 3)
    assert np.bincount(cifar.y_test).tolist() == [1000] * 10
    assert [cifar.classes[y] for y in cifar.y_train[:3]] == ["frog", "truck", "truck"]
    pixels = cifar.x_train.reshape(-1, 3)
    np.testing.assert_allclose(pixels.mean(0), (0.49140, 0.48216, 0.44653), atol=0.005)
    np.testing.assert_allclose(pixels.std(0), (0.24703, 0.24349, 0.26159), atol=0.005)


@pytest.mark.long
@real("imdb")
def test_real_reviews_are_half_positive_with_the_published_number_of_distinct_texts():
    imdb = datasets.load("imdb", download=False)
    assert np.bincount(imdb.y_train).tolist() == np.bincount(imdb.y_test).tolist() == [12_500] * 2
    assert len({*imdb.x_train, *imdb.x_test}) == 49_582
    assert 400 < imdb.y_train[:1000].sum() < 600
