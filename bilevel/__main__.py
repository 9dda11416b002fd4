"""``python -m bilevel``."""

import sys

from bilevel.cli import main

sys.exit(main())
