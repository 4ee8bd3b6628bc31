"""A bucket of DDP's gradients: a step that is not done after all leaves what waits as it was."""

from __future__ import annotations

import pytest
import torch

from mpisparse.comm.exchange import Exchange
from mpisparse.integrations.bucket import Bucket
from mpisparse.schemes import configure


@pytest.mark.parametrize("scheme", ["exdyna", "demo"])
def test_take_back(scheme: str) -> None:
    exchange = Exchange()
    bucket = Bucket({"w": torch.zeros(40, 30), "b": torch.zeros(30)}, configure(scheme, density=0.1), exchange)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        bucket.average([torch.randn(40, 30, generator=draw), torch.randn(30, generator=draw)], 0.1)
    before = bucket.aggregator.residual.clone()
    grads = [torch.randn(40, 30, generator=draw), torch.randn(30, generator=draw)]
    own = torch.cat([grad.reshape(-1) for grad in grads])
    bucket.average(grads, 0.1)
    bucket.take_back()
    kept = own if scheme == "exdyna" else torch.zeros_like(own)  # demo drops the gradient, as a skipped step does
    torch.testing.assert_close(bucket.aggregator.residual, before + kept)
    bucket.close()
    exchange.close()
