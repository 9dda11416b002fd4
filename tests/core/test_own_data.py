"""Own rows: every source gives the same arrays, splits are stratified, wrong data are refused."""

import sys
import types

import jax
import numpy as np
import pytest

from bilevel.data import draw_splits, load
from bilevel.data.image_folders import read_folder

Image = pytest.importorskip("PIL.Image")
KEY = jax.random.key(0)
GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.integers(0, 256, (40, 4, 6, 3), dtype=np.uint8)
NAMES = np.array(["cat", "dog", "eel", "fox"] * 10)
ARRAYS = {"x": PIXELS, "y": NAMES}


def saved(folder, **arrays):
    np.savez(folder / "own.npz", **arrays)
    return folder / "own.npz"


def drawn(folder, parts=("",), mode="RGB", suffix=".png"):
    """A folder of PIXELS by class, in each of the parts."""
    for part in parts:
        for i, (pixels, name) in enumerate(zip(PIXELS, NAMES, strict=True)):
            path = folder / "pictures" / part / name / f"{i:02}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).convert(mode).save(path)
    return folder / "pictures"


def test_every_source_gives_the_same_rows(tmp_path, monkeypatch):
    module = types.ModuleType("module_of_rows")
    module.rows = lambda: ARRAYS
    monkeypatch.setitem(sys.modules, "module_of_rows", module)
    path = saved(tmp_path, **ARRAYS)
    others = str(path), module.rows, "module_of_rows:rows", ARRAYS, {"x": PIXELS, "y": list(NAMES)}
    whole = load(path)
    for source in others:
        for ours, theirs in zip(whole, load(source), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(whole.y_test, load(path, KEY).y_test)
    assert (load(path, jax.random.key(1)).x_test != whole.x_test).any()
    # A folder has its images class by class.
    order = np.argsort(NAMES, kind="stable")
    pictures = load(drawn(tmp_path))
    for ours, theirs in zip(pictures, load({"x": PIXELS[order], "y": NAMES[order]}), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_fifth_is_set_aside_in_proportion_and_every_row_is_used_once():
    y = np.repeat([3, 5, 9], [100, 50, 10])
    data = load({"x": np.arange(160)[:, None], "y": y}, KEY)
    assert [*np.bincount(data.y_test)] == [20, 10, 2] and data.classes == ("3", "5", "9")
    both = np.concatenate([data.x_train, data.x_test]).ravel()
    assert sorted(both) == [*range(160)]
    labels = np.concatenate([data.y_train, data.y_test])
    np.testing.assert_array_equal(np.array(data.classes)[labels].astype(int), y[both])


def test_parts_that_are_given_stay_and_validation_rows_are_drawn_from_theirs(tmp_path):
    parts = {"train": slice(20), "valid": slice(20, 32), "test": slice(32, 40)}
    arrays = {f"x_{part}": PIXELS[rows] for part, rows in parts.items()}
    arrays |= {f"y_{part}": NAMES[rows] for part, rows in parts.items()}
    data = load(saved(tmp_path, **arrays))
    for part in parts:
        np.testing.assert_array_equal(getattr(data, f"x_{part}"), arrays[f"x_{part}"])
    (splits,) = draw_splits(data, [KEY], train=8, valid=12, test=100)
    for (x, y), part, size in zip(splits, parts, (8, 12, 8), strict=True):
        assert x.dtype == np.float32 and len(x) == len(y) == size
        rows = {row.tobytes() for row in arrays[f"x_{part}"]}
        assert {np.rint(255 * row).astype(np.uint8).tobytes() for row in x} <= rows
    with pytest.raises(ValueError, match=r"at most 12 rows .* got 13"):
        draw_splits(data, [KEY], train=8, valid=13, test=1)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *((bool, np.float32), (np.int16, np.float32), (np.int32, np.float64)),
        *((np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64)),
    ],
)
def test_rows_keep_their_dtype_until_they_are_drawn(dtype, expected):
    x = np.arange(20).reshape(10, 2).astype(dtype)
    data = load({"x": x, "y": [0, 1] * 5})
    (((drawn_rows, _), *_),) = draw_splits(data, [KEY], train=4, valid=4, test=1)
    assert data.x_train.dtype == dtype and drawn_rows.dtype == expected


def test_real_targets_have_no_classes():
    data = load({"x": PIXELS, "y": np.arange(40) / 7})
    assert data.classes == () and data.y_test.dtype == float and len(data.y_test) == 8
    (splits,) = draw_splits(data, [KEY], train=20, valid=12, test=9)
    assert [len(y) for _, y in splits] == [20, 12, 8]


def test_a_memory_map_stays_one(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, PIXELS)
    x = np.load(path, mmap_mode="r")
    data = load({"x": x, "y": NAMES, "x_test": x[:4], "y_test": NAMES[:4]})
    assert data.x_train is x


def test_folders_may_be_gray_colour_palette_and_split(tmp_path):
    path = drawn(tmp_path, ("train", "test"), "L", ".JPG")
    (path / "train" / ".DS_Store").write_text("hidden")
    data = load(path)
    assert data.x_train.shape == (40, 4, 6) and data.x_test.shape == (40, 4, 6)
    Image.fromarray(PIXELS[0]).quantize(256).save(path / "train" / "cat" / "palette.png")
    arrays = read_folder(path)
    assert arrays["x_train"].shape == (41, 4, 6, 3) and arrays["x_test"].shape == (40, 4, 6, 3)
    np.testing.assert_array_equal(arrays["x_train"][-31], PIXELS[0])
