"""Everything that is measured beside neural-tangents: kernels, predictions, finite networks.

    python benchmarks/kernels/beside_neural_tangents.py            # half an hour of a core
    python benchmarks/kernels/beside_neural_tangents.py --quick    # small, some minutes
    python benchmarks/kernels/beside_neural_tangents.py --smoke    # finite_kernels.py alone: 10 s
    python benchmarks/kernels/beside_neural_tangents.py --table    # the results files as Markdown

Flags go to each of ``network_kernels.py``, ``predictions.py`` and ``finite_kernels.py``, which have
results files of their own.
"""

import argparse
import subprocess
import sys
from pathlib import Path

SCRIPTS = "network_kernels", "predictions", "finite_kernels"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = parser.add_mutually_exclusive_group()
    for flag in ("--smoke", "--quick", "--table"):
        sizes.add_argument(flag, action="store_true")
    parser.add_argument("--peers", nargs="*", choices=["neural-tangents"])
    smoke, failed = parser.parse_args().smoke, []
    for name in SCRIPTS[-1:] if smoke else SCRIPTS:
        print(f"# {name}", flush=True)
        script = str(Path(__file__).with_name(f"{name}.py"))
        if subprocess.run([sys.executable, script, *sys.argv[1:]]).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
