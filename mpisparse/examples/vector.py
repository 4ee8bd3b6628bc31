"""Average a plain vector over ranks, a tenth of it in each step: `mpirun -n 2 python -m mpisparse.examples.vector`."""

import torch

import mpisparse

aggregator = mpisparse.aggregator(1000, density=0.1)  # on every rank: vectors of 1,000 elements
rank = aggregator.parts.exchange.rank
received = torch.zeros(1000)
for step in range(50):
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(100 * rank + step))  # each rank has its own
    received += aggregator.step(vector)  # the mean over ranks of about 100 elements, zero elsewhere
print(f"r{rank} | the norm of all means is {received.norm():.4f}, of what waits here {aggregator.residual.norm():.4f}")
aggregator.close()
