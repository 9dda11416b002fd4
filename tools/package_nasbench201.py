"""Packs the tables of NAS-Bench-201 that come with the package.

    BILEVEL_DATA=folder python tools/package_nasbench201.py
    python tools/package_nasbench201.py --smoke    # the packed tables again, in another folder

Reads them, plain, ``.gz`` or ``.xz``, in ``folder/nasbench201``, checks their content, and writes
``bilevel/spaces/nasbench201/judging/tables/*.csv.xz``, in which there is no date and no name: with
one version of liblzma, always the same bytes. What is in the tables: the README.md beside them.
"""

import argparse
import lzma
import os
import sys
import tempfile
from pathlib import Path

from bilevel.data.files import check_digest, read_file
from bilevel.spaces.nasbench201.judging import table


def pack(source: Path, target: Path, preset: int = 9 | lzma.PRESET_EXTREME) -> None:
    """Each shipped table of the folder `source`, checked, as an .xz file in `target`."""
    for file in table.SHIPPED:
        path, content = read_file(source, file)
        _, digest = table.FILES[file]
        check_digest(path, content, digest)
        packed = lzma.compress(content, preset=preset)
        (target / f"{file}.xz").write_bytes(packed)
        print(f"{file}.xz: {len(packed):,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="only shows that the script runs")
    if parser.parse_args().smoke:
        with tempfile.TemporaryDirectory() as folder:
            pack(table.TABLES, Path(folder), preset=0)
    elif root := os.environ.get("BILEVEL_DATA"):
        pack(Path(root) / "nasbench201", table.TABLES)
    else:
        sys.exit("BILEVEL_DATA: expected the folder that holds nasbench201/, got none.")


if __name__ == "__main__":
    main()
