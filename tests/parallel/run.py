"""Run the parallel suite: `mpirun -n N python tests/parallel/run.py [pytest options] [files]`.

Rank 0 reports; the output of another rank is shown only if something failed there. All ranks exit alike.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest
from mpi4py import MPI


def main() -> int:
    comm = MPI.COMM_WORLD
    where = [] if any(word.endswith(".py") for word in sys.argv[1:]) else [str(Path(__file__).parent)]
    args = ["--with-mpi", "-p", "no:cacheprovider", "-q", *where, *sys.argv[1:]]
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet) if comm.rank else contextlib.nullcontext():
        code = int(pytest.main(args))
    codes = comm.allgather(code)
    for rank in range(1, comm.size):
        comm.Barrier()
        if rank == comm.rank and code:
            print(f"--- rank {rank} ---\n{quiet.getvalue()}", flush=True)
    return max(codes)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
