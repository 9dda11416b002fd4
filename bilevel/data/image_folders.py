"""Read images from folders, one folder for each class."""

from pathlib import Path
from typing import Any

import numpy as np

_PARTS = {"train": "train", "valid": "valid", "val": "valid", "test": "test"}
_SUFFIXES = ".png", ".jpg", ".jpeg"
_OF_THE_SYSTEM = "thumbs.db", "desktop.ini"
_GRAY = "1", "L", "LA"  # modes of Pillow
_ORIENTATION = 0x0112  # EXIF tag of cameras: how to turn the image


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Return the images in ``CLASS/*.png`` or ``PART/CLASS/*.png``, uint8, and classes, by part."""
    files = {part: _files_by_class(path) for part, path in _parts(folder).items()}
    (height, width), mode = _common_size([file for part in files.values() for file, _ in part])
    shape = (height, width) if mode == "L" else (height, width, 3)
    arrays = {}
    for part, own in files.items():
        arrays[f"x_{part}"] = x = np.empty((len(own), *shape), np.uint8)
        for i, (file, _) in enumerate(own):
            x[i] = np.asarray(_opened(file, lambda image: image.convert(mode)))
        arrays[f"y_{part}"] = np.array([name for _, name in own])
    return arrays


def _parts(folder: Path) -> dict[str, Path]:
    """Return the folders of the parts; a ``train`` that contains images is a class."""
    if not any(path.is_dir() for path in _entries(folder / "train")):
        return {"train": folder}
    entries = _entries(folder)
    if other := [path for path in entries if path.name not in _PARTS]:
        raise ValueError(
            f"{folder}: expected only train, valid and test next to train, got {other[0].name!r}."
        )
    parts = {_PARTS[path.name]: path for path in entries}
    if len(parts) < len(entries):
        raise ValueError(f"{folder}: expected valid or val, got both.")
    return parts


def _files_by_class(folder: Path) -> list[tuple[Path, str]]:
    """Return every image below ``folder`` with its class, in the order of their names."""
    classes = _entries(folder)
    if not classes:
        raise ValueError(f"{folder}: expected folders CLASS/*.png, got an empty folder.")
    files = []
    for path in classes:
        if not path.is_dir():
            raise ValueError(f"{folder}: expected only folders CLASS/*.png, got {path.name!r}.")
        own = _entries(path)
        if not own:
            raise ValueError(f"{path}: expected .png or .jpg images, got an empty folder.")
        for file in own:
            if file.suffix.lower() not in _SUFFIXES or file.is_dir():
                raise ValueError(f"{path}: expected only .png and .jpg images, got {file.name!r}.")
        files += [(file, path.name) for file in own]
    return files


def _entries(folder: Path) -> list[Path]:
    """List a folder, if it is one, without the hidden files of operating systems."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    shown = [path for path in paths if not path.name.startswith((".", "__"))]
    return [path for path in shown if path.name.lower() not in _OF_THE_SYSTEM]


def _common_size(files: list[Path]) -> tuple[tuple[int, int], str]:
    """Return height and width of all images, and Pillow's mode that holds them all."""
    width, height = _opened(files[0], lambda image: image.size)
    gray = True
    for file in files:
        size, mode, fault = _opened(
            file, lambda image: (image.size, image.mode, _unmet_expectation(image))
        )
        if fault:
            raise ValueError(f"{file}: expected {fault}.")
        if size != (width, height):
            raise ValueError(
                f"{file}: expected {width} x {height} pixels as in {files[0]}, got "
                f"{size[0]} x {size[1]}; resize the images to one size."
            )
        gray = gray and mode in _GRAY
    return (height, width), "L" if gray else "RGB"


def _unmet_expectation(image: Any) -> str:
    """Return the expectation that an image of Pillow does not meet, or an empty string."""
    # Cameras add a preview to MPO files, which are JPEG files otherwise.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        return "one image, got an animation"
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    if alpha and alpha.getextrema()[0] < 255:
        return "1 or 3 channels, got an image with transparency (alpha); save it without"
    return f"8 bits a channel, got Pillow's mode {image.mode}" if image.mode[0] in "IF" else ""


def _opened(file: Path, function: Any) -> Any:
    """Return ``function`` of an image file."""
    try:
        from PIL import Image, ImageOps  # the extra `images`
    except ImportError:
        raise ImportError(
            f"{file.parent}: expected Pillow to read images, got none; install it with "
            "`pip install pillow`."
        ) from None
    try:
        with Image.open(file) as image:
            # Without this condition a PNG would be decoded to look for the tag.
            tagged = any("exif" in str(key) or "xmp" in str(key) for key in image.info)
            turned = tagged and image.getexif().get(_ORIENTATION, 1) != 1
            return function(ImageOps.exif_transpose(image) if turned else image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0].replace(f" {str(file)!r}", "")
        raise ValueError(f"{file}: expected an image, got a damaged one ({reason}).") from None
