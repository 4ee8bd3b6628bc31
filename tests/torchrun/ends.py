"""Under torchrun: how a job ends when a rank hangs (exit code 87), or raises."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import mpisparse

if __name__ == "__main__":
    dist.init_process_group("gloo")
    sync = mpisparse.GradientSync(torch.nn.Linear(9, 9), comm=dist.group.WORLD, timeout=1.0)
    if dist.get_rank() == 1:
        if sys.argv[1] == "raises":
            raise OSError("the data set is gone")
        time.sleep(100_000)
    sync.agree_any(False)
