"""Run a script or a module with Debian's Python packages first and those of the tests' environment after them.

`python3 beside.py PACKAGES SCRIPT|-m MODULE [arguments]`: h5py with MPI, mpi4py and NumPy are Debian's, the rest is ours.
"""

from __future__ import annotations

import os
import runpy
import site
import sys

packages, what, *rest = sys.argv[1:]
site.addsitedir(packages)
if what == "-m":
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
else:
    sys.argv = [what, *rest]
    sys.path[0] = os.path.dirname(what)
    runpy.run_path(what, run_name="__main__")
