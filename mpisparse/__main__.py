"""`python -m mpisparse`: the command line, for when the console script is not on the PATH."""

from __future__ import annotations

import sys

from mpisparse.runtime.cli import main

sys.exit(main())
