"""Pack the tables of NAS-Bench-201 that come with the package.

    BILEVEL_DATA=folder python tools/package_nasbench201.py
    python tools/package_nasbench201.py --smoke    # the packed tables again, in another folder

The script reads plain, ``.gz`` or ``.xz`` tables in ``folder/nasbench201``, checks their content,
and writes ``bilevel/spaces/nasbench201/judging/tables/*.csv.xz``. The packed files contain neither
dates nor file names, so one version of liblzma always writes the same bytes. The README.md in that
folder describes the tables.
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
    """Check each shipped table of the folder `source` and pack it as an .xz file in `target`."""
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
