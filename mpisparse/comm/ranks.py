"""This process's rank, the number of ranks, and its rank on its host, before there is a model."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch.distributed as dist

from mpisparse.comm.transport import local_rank as _local_rank
from mpisparse.comm.transport import started
from mpisparse.comm.world import check_world, started_by
from mpisparse.errors import ConfigurationError

LOCAL_RANKS = {  # the variables of each launcher
    "torchrun": ("LOCAL_RANK",),
    "mpirun": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "srun": ("SLURM_LOCALID",),
}


class Standing(NamedTuple):
    """A process's rank and the number of ranks."""

    rank: int
    size: int


def rank() -> int:
    """Return the rank of this process, as GradientSync will have it; local. Starts MPI.

    It is MPI's rank, or under torchrun, once a process group is initialised, the group's. Raises ConfigurationError if a
    launcher started more processes than see each other.
    """
    return standing().rank


def size() -> int:
    """Return the number of ranks, as GradientSync will have it; local. Starts MPI. See rank()."""
    return standing().size


def local_rank() -> int:
    """Return the rank of this process among those on its host, to choose a device: `cuda:{mpisparse.local_rank()}`.

    Local under torchrun, srun, and mpirun of Open MPI and MPICH, which set it in a variable; elsewhere collective.
    """
    if size() == 1:
        return 0
    for name in LOCAL_RANKS.get(started_by(), ()):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return _local_rank(dist.group.WORLD if _in_group() else None)


def standing() -> Standing:
    """Return rank and size."""
    if _in_group():
        return Standing(dist.get_rank(), dist.get_world_size())
    if started_by() == "torchrun" and os.environ.get("WORLD_SIZE") != "1":
        raise ConfigurationError(
            "under torchrun the ranks are those of a process group: call torch.distributed.init_process_group() first"
        )
    return _in_mpi()


def _in_group() -> bool:
    """Whether this process belongs to a process group and to no MPI job."""
    return dist.is_available() and dist.is_initialized() and started_by() == "torchrun"


@functools.cache
def _in_mpi() -> Standing:
    """Return MPI's rank and size, if its launcher agrees."""
    mpi = started()
    comm = mpi.everyone()
    check_world(comm.Get_size(), mpi.library()["name"])
    return Standing(comm.Get_rank(), comm.Get_size())
