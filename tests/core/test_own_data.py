"""Own rows: every source gives the same arrays, splits are stratified, wrong data are refused."""

import functools
import io
import pathlib
import struct
import sys
import types
import zlib

import jax
import numpy as np
import pytest

from bilevel.data import draw_splits, load
from bilevel.data.image_folders import read_folder

Image = pytest.importorskip("PIL.Image")
GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.integers(0, 256, (40, 4, 6, 3), dtype=np.uint8)
NAMES = np.array(["cat", "dog", "eel", "fox"] * 10)
ARRAYS = {"x": PIXELS, "y": NAMES}


def saved(folder, **arrays):
    path = folder / "own.npz"
    np.savez(path, **arrays)
    return path


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
    np.testing.assert_array_equal(whole.y_test, load(path, jax.random.key(0)).y_test)
    assert (load(path, jax.random.key(1)).x_test != whole.x_test).any()
    # A folder has its images class by class.
    order = np.argsort(NAMES, kind="stable")
    pictures = load(drawn(tmp_path))
    for ours, theirs in zip(pictures, load({"x": PIXELS[order], "y": NAMES[order]}), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_fifth_is_set_aside_in_proportion_and_every_row_is_used_once():
    y = np.repeat([3, 5, 9], [100, 50, 10])
    data = load({"x": np.arange(160)[:, None], "y": y}, jax.random.key(0))
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
    (splits,) = draw_splits(data, [jax.random.key(0)], train=8, valid=12, test=100)
    for (x, y), part, size in zip(splits, parts, (8, 12, 8), strict=True):
        assert x.dtype == np.float32 and len(x) == len(y) == size
        rows = {row.tobytes() for row in arrays[f"x_{part}"]}
        assert {np.rint(255 * row).astype(np.uint8).tobytes() for row in x} <= rows
    with pytest.raises(ValueError, match=r"at most 12 rows .* got 13"):
        draw_splits(data, [jax.random.key(0)], train=8, valid=13, test=1)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *((bool, np.float32), (np.int16, np.float32), (np.int32, np.float64)),
        *((np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64)),
    ],
)
def test_rows_keep_their_dtype_until_they_are_drawn(dtype, expected):
    data = load({"x": np.arange(20).reshape(10, 2).astype(dtype), "y": [0, 1] * 5})
    (((drawn_rows, _), *_),) = draw_splits(data, [jax.random.key(0)], train=4, valid=4, test=1)
    assert data.x_train.dtype == dtype and drawn_rows.dtype == expected


def test_real_targets_have_no_classes():
    data = load({"x": PIXELS, "y": np.arange(40) / 7})
    assert data.classes == () and data.y_test.dtype == float and len(data.y_test) == 8
    (splits,) = draw_splits(data, [jax.random.key(0)], train=20, valid=12, test=9)
    assert [len(y) for _, y in splits] == [20, 12, 8]


def test_a_memory_map_stays_one(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, PIXELS)
    x = np.load(path, mmap_mode="r")
    assert load({"x": x, "y": NAMES, "x_test": x[:4], "y_test": NAMES[:4]}).x_train is x


def test_folders_may_be_gray_colour_palette_and_split(tmp_path):
    path = drawn(tmp_path, ("train", "test"), "L", ".JPG")
    (path / "train" / ".DS_Store").write_text("hidden")
    data = load(path)
    assert data.x_train.shape == (40, 4, 6) and data.x_test.shape == (40, 4, 6)
    Image.fromarray(PIXELS[0]).quantize(256).save(path / "train" / "cat" / "palette.png")
    arrays = read_folder(path)
    assert arrays["x_train"].shape == (41, 4, 6, 3) and arrays["x_test"].shape == (40, 4, 6, 3)
    np.testing.assert_array_equal(arrays["x_train"][-31], PIXELS[0])


# ----------------------------------------------------------------------------- wrong data

X, Y = np.ones((10, 3), np.float32), [0, 1] * 5
GRAY = np.ones((10, 4, 4), np.float32)
SPLIT = {"x": X, "y": Y, "x_test": X[:2], "y_test": [0, 1]}
WRONG_ARRAYS = [
    ({"x": X}, "expected the key y, got x"),
    ({"y": Y}, "expected the key x, got y"),
    ({}, "expected the key x, got no keys"),
    ({"x": X, "y": Y, "x_tset": X}, "expected keys among x, y, .* got 'x_tset'"),
    ({"x": X, "y": Y, "x_test": X}, "expected the key y_test, got x, y"),
    ({"x": X, "y": Y, "x_train": X, "y_train": Y}, "got a mixture"),
    ({"x": X, "y": Y[:-1]}, "y: expected 10 labels, .* got 9"),
    ({"x": X * [1, 1, np.nan], "y": Y}, "x: expected finite numbers, .* in row 0"),
    ({"x": X, "y": [1.0] * 9 + [np.inf]}, "y: expected finite numbers, got inf in row 9"),
    ({"x": X, "y": [7] * 10}, "expected at least 2 classes, got only 7"),
    ({"x": X, "y": [*Y[:-1], 9]}, "at least 2 rows of every class, .* '9'"),
    (SPLIT | {"y_test": [0, 5]}, "y_test: expected the classes of the training rows, got '5'"),
    (
        SPLIT | {"y_test": [0.0, 1.0]},
        "y_test: expected labels of dtype int64 as in training, got float64",
    ),
    ({"x": X, "y": np.eye(10)}, r"shape \[n\], .* got \(10, 10\)"),
    ({"x": X.astype(object), "y": Y}, "x: expected an array of numbers, got dtype object"),
    ({"x": X, "y": [{}] * 10}, "integers or strings .* got dtype object"),
    ({"x": X.astype(str), "y": Y}, "x: expected an array of numbers, got dtype <U"),
    ({"x": X * 1j, "y": Y}, "x: expected an array of numbers, got dtype complex"),
    ({"x": X[:0], "y": []}, r"expected at least one row .* got shape \(0, 3\)"),
    ({"x": X[:, :0], "y": Y}, r"expected at least one row .* got shape \(10, 0\)"),
    ({"x": X[:, 0], "y": Y}, r"x: expected shape \[n, d\], .* got \(10,\)"),
    ({"x": np.ones((10, 1, 2, 3, 4)), "y": Y}, r"expected shape .* got \(10, 1, 2, 3, 4\)"),
    ({"x": np.ones((10, 3, 4, 4)), "y": Y}, "1 or 3 channels, got shape"),
    (
        {"x": GRAY, "y": Y, "x_test": GRAY[:2, :3], "y_test": [0, 1]},
        r"x_test: expected rows of shape \(4, 4\) .* got \(3, 4\)",
    ),
    (
        SPLIT | {"x": X.astype(np.uint8)},
        "x_test: expected rows .* uint8 as in training, got .* float32",
    ),
]


@pytest.mark.parametrize(("arrays", "message"), WRONG_ARRAYS)
def test_wrong_arrays_raise_one_message(arrays, message):
    with pytest.raises(ValueError, match=message):
        load(arrays)


def write_png_of_16_bits(path, pixels):
    """Pillow does not write this format."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        content += struct.pack(">I", len(data)) + kind + data
        content += struct.pack(">I", zlib.crc32(kind + data))
    path.write_bytes(content)


GRADIENT = np.uint8(np.arange(24).reshape(4, 6, 1) * [10, 5, 2])
DEEP = GENERATOR.integers(0, 2**16, (4, 6, 3))
OPAQUE = np.concatenate([DEEP, np.full((4, 6, 1), 2**16 - 1)], axis=2)
PREVIEW = {"quality": 100, "subsampling": 0, "save_all": True}
PREVIEW["append_images"] = [Image.fromarray(PIXELS[0])]
SHADES, COLORS = Image.fromarray(PIXELS[0, ..., 0]), Image.fromarray(GRADIENT)
FORMATS = {
    "color of 16 bits": (lambda path: write_png_of_16_bits(path, DEEP), DEEP >> 8),
    "opaque color of 16 bits": (lambda path: write_png_of_16_bits(path, OPAQUE), DEEP >> 8),
    "gray in a palette": (SHADES.convert("P").save, PIXELS[0, ..., :1].repeat(3, axis=2)),
    "two colors": (Image.fromarray(PIXELS[0, ..., 0] > 99).save, 255 * (PIXELS[0, ..., 0] > 99)),
    "opaque gray": (SHADES.convert("LA").save, PIXELS[0, ..., 0]),
    "CMYK": (lambda path: COLORS.convert("CMYK").save(path, "JPEG", quality=100), GRADIENT),
    "the preview of a camera": (lambda path: COLORS.save(path, "MPO", **PREVIEW), GRADIENT),
}


@pytest.mark.parametrize("case", FORMATS)
def test_images_of_every_format_have_the_right_pixels(case, tmp_path):
    write, expected = FORMATS[case]
    for name in ("a", "ö b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "1.png")
        write(tmp_path / name / "2.png")
        (tmp_path / name / ".DS_Store").write_bytes(b"1")
    assert load(tmp_path).classes == ("a", "ö b")
    x = read_folder(tmp_path)["x_train"]
    rounding = 3 if case in ("CMYK", "the preview of a camera") else 0  # JPEG at its best quality
    np.testing.assert_allclose(x.astype(int), [expected] * 4, atol=rounding)


UPRIGHT = GENERATOR.integers(0, 256, (4, 6), dtype=np.uint8)
# The image as the camera stored it, for the values 1 to 8 of the tag.
STORED = [UPRIGHT, UPRIGHT[:, ::-1], UPRIGHT[::-1, ::-1], UPRIGHT[::-1]]
STORED += [UPRIGHT.T, np.rot90(UPRIGHT), UPRIGHT[::-1, ::-1].T, np.rot90(UPRIGHT, -1)]
XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-'
    b'syntax-ns#"><rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" '
    b'tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


def test_images_of_cameras_are_turned(tmp_path):
    for path in (tmp_path / kind / name for kind in ("exif", "xmp") for name in ("a", "b")):
        path.mkdir(parents=True)
    for name in ("a", "b"):
        for tag, stored in enumerate(STORED, 1):
            exif = Image.Exif()
            exif[0x0112] = tag
            Image.fromarray(stored.copy()).save(tmp_path / "exif" / name / f"{tag}.png", exif=exif)
        # Some programs write the tag as XMP only.
        image = Image.fromarray(np.rot90(GRADIENT[..., 0]).copy())
        image.save(tmp_path / "xmp" / name / "1.jpg", quality=100, xmp=XMP)
    np.testing.assert_array_equal(read_folder(tmp_path / "exif")["x_train"], [UPRIGHT] * 16)
    x = read_folder(tmp_path / "xmp")["x_train"].astype(int)
    np.testing.assert_allclose(x, [GRADIENT[..., 0]] * 2, atol=3)


# How a folder of arrays or images is damaged: each function returns the path to load.


def archive(content):
    def make(folder):
        path = folder / "own.npz"
        path.write_bytes(content)
        return path

    return make


def with_image(name, write, parts=("",)):
    def make(folder):
        path = drawn(folder, parts)
        write(path / name)
        return path

    return make


def animated(form):
    first, second = (Image.fromarray(pixels) for pixels in PIXELS[:2])
    options = {"save_all": True, "append_images": [second]}
    return with_image("dog/moving.png", lambda path: first.save(path, form, **options))


def renamed(old, new):
    return with_image(old, lambda path: path.rename(path.with_name(new)), ("train", "test"))


def bytes_of(save, *args, **arrays):
    buffer = io.BytesIO()
    save(buffer, *args, **arrays)
    return buffer.getvalue()


INTACT = bytes_of(np.savez, **ARRAYS)
FLIPPED = INTACT[:500] + bytes([INTACT[500] ^ 255]) + INTACT[501:]
WRONG_FILES = {
    "missing.npz: expected a file, got no such file": lambda folder: folder / "missing.npz",
    "source: expected a built-in name, FILE.npz, .* got '.*missing'": lambda path: path / "missing",
    "own.npz: expected a .npz file .* got another format": tuple(
        archive(content) for content in (b"x,y\n1,2\n", bytes_of(np.save, X), INTACT[:-200])
    ),
    "own.npz: expected an intact .npz file, got: ": archive(FLIPPED),
    "own.npz: expected arrays of numbers or strings, got dtype object": archive(
        bytes_of(np.savez, x=X, y=np.array(["a", 1] * 5, dtype=object))
    ),
    "own.npz: expected keys among x, y, .* got 'notes'": archive(  # before any array is read
        bytes_of(np.savez, x=X, y=Y, notes=np.array([{}]))
    ),
    r"expected folders CLASS/\*.png, got an empty folder": lambda folder: folder,
    "ape: expected .png or .jpg images, got an empty folder": with_image("ape", pathlib.Path.mkdir),
    r"cat: expected only folders CLASS/\*.png, got '00.png'": lambda folder: drawn(folder) / "cat",
    "moving.png: expected one image, got an animation": (animated("PNG"), animated("GIF")),
    "dog: expected only .png and .jpg images, got 'labels.csv'": with_image(
        "dog/labels.csv", lambda path: path.write_text("1,2")
    ),
    "y_test: expected the classes of the training rows, got 'emu'": renamed("test/dog", "emu"),
    "expected only train, valid and test next to train, got 'tset'": renamed("test", "tset"),
}
CLEAR = Image.fromarray(np.uint8([[[9, 9, 9, 254]] * 6] * 4))
PALETTE = functools.partial(Image.fromarray(PIXELS[0]).quantize(64).save, transparency=3)
DEEP_GRAY = Image.fromarray(np.ones((4, 6), np.uint16))
DAMAGED = "an image, got a damaged one"
WRONG_IMAGES = {
    "small.png": (Image.fromarray(PIXELS[0, :3]).save, "6 x 4 pixels as in .* got 6 x 3"),
    "text.png": (lambda path: path.write_text("not a picture"), DAMAGED),
    "01.png": (lambda path: path.write_bytes(path.read_bytes()[:60]), DAMAGED),
    "00.png": (CLEAR.save, "1 or 3 channels, got an image with transparency"),
    "clear.png": (PALETTE, "1 or 3 channels, got an image with transparency"),
    "deep.png": (DEEP_GRAY.save, "8 bits a channel, got Pillow's mode I;16"),
}
WRONG_FILES |= {
    f"{name}: expected {message}": with_image(f"dog/{name}", write)
    for name, (write, message) in WRONG_IMAGES.items()
}


@pytest.mark.parametrize("message", WRONG_FILES)
def test_wrong_files_raise_one_message(tmp_path, message):
    makers = WRONG_FILES[message]
    for i, make in enumerate(makers if isinstance(makers, tuple) else (makers,)):
        folder = tmp_path / str(i)
        folder.mkdir()
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            load(make(folder))


def test_without_pillow_there_is_one_message(tmp_path, monkeypatch):
    path = drawn(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"expected Pillow to read images, got none; install"):
        load(path)
