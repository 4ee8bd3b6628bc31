"""Run the parallel suite: `mpirun -n N python tests/parallel/run.py [pytest options] [files]`.

Rank 0 reports; the output of another rank is shown only if something failed there. All ranks exit alike. Each rank has a
temporary directory of its own: in one that they share, pytest's clearing of old runs on one rank trips over that of another.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from mpi4py import MPI


def main() -> int:
    comm = MPI.COMM_WORLD
    where = [] if any(word.endswith(".py") for word in sys.argv[1:]) else [str(Path(__file__).parent)]
    scratch = comm.bcast(tempfile.mkdtemp(prefix="mpisparse-tests-") if comm.rank == 0 else None)
    args = ["--with-mpi", "-p", "no:cacheprovider", "-q", f"--basetemp={scratch}/{comm.rank}", *where, *sys.argv[1:]]
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet) if comm.rank else contextlib.nullcontext():
        code = int(pytest.main(args))
    codes = comm.allgather(code)
    if comm.rank == 0 and not any(codes):
        shutil.rmtree(scratch, ignore_errors=True)
    for rank in range(1, comm.size):
        comm.Barrier()
        if rank == comm.rank and code:
            print(f"--- rank {rank} ---\n{quiet.getvalue()}", flush=True)
    return max(codes)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
