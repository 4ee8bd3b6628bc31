"""Under torchrun: how a job ends when a rank hangs (exit code 87), or raises."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import mpisparse

if __name__ == "__main__":
    dist.init_process_group("gloo")
    in_torch = sys.argv[1] in ("fails", "leaves")
    timeout = 600.0 if in_torch else 1.0
    sync = mpisparse.GradientSync(torch.nn.Linear(9, 9), comm=dist.group.WORLD, timeout=timeout)
    if in_torch:  # while the others are in a collective of torch's
        if dist.get_rank() == 1:
            if sys.argv[1] == "leaves":
                sys.exit(3)
            raise OSError("the data set is gone")
        dist.barrier()
    if dist.get_rank() == 1:
        if sys.argv[1] == "raises":
            raise OSError("the data set is gone")
        time.sleep(100_000)
    sync.agree_any(False)
