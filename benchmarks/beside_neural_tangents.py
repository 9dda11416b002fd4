"""Everything that is measured beside neural-tangents: kernels, predictions, finite networks.

    python benchmarks/beside_neural_tangents.py            # half an hour of a core
    python benchmarks/beside_neural_tangents.py --quick    # small, some minutes
    python benchmarks/beside_neural_tangents.py --table    # the results files as Markdown

Flags go to each of ``network_kernels.py``, ``predictions.py`` and ``finite_kernels.py``, which have
results files of their own.
"""

import subprocess
import sys
from pathlib import Path

SCRIPTS = "network_kernels", "predictions", "finite_kernels"


def main() -> int:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return 0
    failed = 0
    for name in SCRIPTS:
        print(f"# {name}", flush=True)
        script = str(Path(__file__).with_name(f"{name}.py"))
        failed |= subprocess.run([sys.executable, script, *sys.argv[1:]]).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
