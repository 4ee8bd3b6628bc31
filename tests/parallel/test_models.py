"""All kinds of torch models: nothing is lost and replicas stay bitwise equal, on both paths."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from ranks import PATHS, alike, everywhere, in_memory_order, lawful_steps, raised, seeded, total, train_lawfully, trainable
from torch import nn

import mpisparse

pytestmark = pytest.mark.mpi

both_paths = pytest.mark.parametrize("path", PATHS)


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def squares(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Return a loss for models with 20 inputs."""
    return model(randn(generator, 8, 20)).float().square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


@both_paths
def test_frozen_parameters(comm: MPI.Intracomm, path: str) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    model[0].weight.requires_grad_(False)
    start = model[0].weight.clone()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    assert sync.residual.numel() == 30 + 150 + 5
    train_lawfully(comm, model, sync, sgd(model), squares)
    assert model[0].weight.grad is None
    if comm.rank == 0:
        assert torch.equal(model[0].weight, start)
    assert not torch.equal(model[0].bias, torch.zeros(30))


class Branches(nn.Module):
    """Two heads, of which each call uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(20, 10)
        self.heads = nn.ModuleList([nn.Linear(10, 4), nn.Linear(10, 4)])
        self.used = (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.trunk(x).tanh()
        return torch.cat([self.heads[head](features) for head in self.used])


@both_paths
@pytest.mark.parametrize(("scheme", "density"), [("exdyna", 0.2), ("exdyna", 1.0), ("dense", None)])
def test_parameters_unused_on_all_ranks(comm: MPI.Intracomm, path: str, scheme: str, density: float | None) -> None:
    model = Branches()
    model.used = (0,)
    sync = mpisparse.GradientSync(model, scheme=scheme, density=density, accumulate=path)
    start = [p.clone() for p in model.heads[1].parameters()]
    for _ in lawful_steps(comm, model, sync, sgd(model), squares, 4):
        assert everywhere(comm, all(p.grad is None for p in model.heads[1].parameters())), "an unused parameter keeps None"
        assert everywhere(comm, all(p.grad is not None for p in model.heads[0].parameters()))
    for p, before in zip(model.heads[1].parameters(), start, strict=True):
        assert torch.equal(p, before), "weight decay must not move what has no gradient"


@both_paths
@pytest.mark.parametrize("scheme", ["exdyna", "dense"])
def test_parameters_unused_on_some_ranks_and_in_some_steps(comm: MPI.Intracomm, path: str, scheme: str) -> None:
    model = Branches()
    sync = mpisparse.GradientSync(model, scheme=scheme, density=0.2 if scheme == "exdyna" else None, accumulate=path)
    seen = []

    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        step = len(seen)
        alone = step % comm.size == comm.rank  # one rank uses both heads, the others the first; at times none does
        model.used = (0, 1) if alone and step % 3 else (0,)
        return squares(model, generator)

    for step in lawful_steps(comm, model, sync, sgd(model), loss, 7):
        seen.append(step)
        if step % 3:
            assert everywhere(comm, all(p.grad is not None for p in model.parameters())), (
                "used somewhere, published everywhere"
            )
    assert len(seen) == 7


@both_paths
def test_what_the_residual_holds_of_an_unused_parameter_is_still_sent(comm: MPI.Intracomm, path: str) -> None:
    model = Branches()
    sync = mpisparse.GradientSync(model, density=0.02, accumulate=path)
    sync.residual[-4:] = 1e3  # the bias of the second head, which is never used
    model.used = (0,)
    for step in lawful_steps(comm, model, sync, sgd(model), squares, 3):
        if step == 0:
            assert everywhere(comm, torch.equal(model.heads[1].bias.grad, torch.full((4,), 1e3)))
    assert not sync.residual[-4:].any()


@both_paths
def test_tied_weights(comm: MPI.Intracomm, path: str) -> None:
    model = nn.Sequential(nn.Linear(20, 20, bias=False), nn.Tanh(), nn.Linear(20, 20))
    model[2].weight = model[0].weight
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    assert sync.residual.numel() == 400 + 20
    train_lawfully(comm, model, sync, sgd(model), squares)
    assert model[2].weight is model[0].weight


@both_paths
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("scheme", "density"), [("exdyna", 0.1), ("dense", None)])
@pytest.mark.pairs
def test_parameters_of_another_type(
    comm: MPI.Intracomm, path: str, dtype: torch.dtype, scheme: str, density: float | None
) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)).to(dtype)
    sync = mpisparse.GradientSync(model, scheme=scheme, density=density, accumulate=path)
    assert sync.residual.dtype is torch.float32

    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        return model(randn(generator, 8, 20).to(dtype)).square().mean()

    for _ in lawful_steps(comm, model, sync, sgd(model), loss, 5):
        assert everywhere(comm, all(p.grad.dtype is dtype for p in model.parameters()))
        assert everywhere(comm, all(p.grad.isfinite().all() for p in model.parameters()))


class Weight(nn.Module):
    """One parameter, whose gradient is the input."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@both_paths
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "density"), [("exdyna", 1.0), ("exdyna", 0.5), ("dense", None)])
@pytest.mark.pairs
def test_rounding_is_fed_back(
    comm: MPI.Intracomm, path: str, dtype: torch.dtype, scheme: str, density: float | None
) -> None:
    """What a 16-bit gradient cannot represent stays in the residual and is sent later; in the end nothing is missing."""
    model = Weight(64, dtype)
    sync = mpisparse.GradientSync(model, scheme=scheme, density=density, accumulate=path)
    sync.residual.fill_(1 / 3)
    model(torch.ones(64, dtype=dtype)).backward()
    sync.step()
    first = model.weight.grad.double()
    mean = torch.full((64,), 4 / 3, dtype=torch.float32)
    chosen = first != 0
    assert int(chosen.sum()) == 64 if scheme == "dense" or density == 1.0 else chosen.any()
    assert torch.equal(first[chosen], mean.to(dtype).double()[chosen])
    rest = (mean.double() - first)[chosen]
    assert bool((rest.abs() > 0).all())
    torch.testing.assert_close(sync.residual.double()[chosen], rest, rtol=1e-3, atol=1e-9)
    sync.close()


@both_paths
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "density"), [("exdyna", 0.5), ("exdyna", 1.0), ("dense", None)])
@pytest.mark.pairs
def test_huge_values_are_clamped_and_the_rest_is_sent_later(
    comm: MPI.Intracomm, path: str, dtype: torch.dtype, scheme: str, density: float | None
) -> None:
    limit = torch.finfo(dtype).max
    huge = 200_000.0 if dtype is torch.float16 else 3.4e38 / comm.size
    model = Weight(20, dtype)
    sync = mpisparse.GradientSync(model, scheme=scheme, density=density, accumulate=path)
    sync.residual.fill_(huge)
    sync.residual[::2] *= -1
    held = total(comm, sync.residual)
    sent = torch.zeros(20, dtype=torch.float64)
    for _ in range(12):
        model.zero_grad()
        model(torch.zeros(20, dtype=dtype)).backward()
        sync.step()
        assert everywhere(comm, model.weight.grad.isfinite().all())
        assert everywhere(comm, model.weight.grad.double().abs().max() <= limit)
        assert everywhere(comm, sync.residual.isfinite().all())
        sent += comm.size * model.weight.grad.double()
    torch.testing.assert_close(sent, held, rtol=1e-3, atol=0)
    sync.close()


class Mixed(nn.Module):
    """Layers of four alternating types, so that published gradients need several buffers."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float16, torch.float32]
        self.layers = nn.ModuleList(nn.Linear(20, 20).to(kind) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


@both_paths
@pytest.mark.parametrize(("scheme", "density"), [("exdyna", 0.1), ("exdyna", 1.0), ("dense", None)])
@pytest.mark.singles
def test_mixed_types(comm: MPI.Intracomm, path: str, scheme: str, density: float | None) -> None:
    model = Mixed()
    sync = mpisparse.GradientSync(model, scheme=scheme, density=density, accumulate=path)
    for _ in lawful_steps(comm, model, sync, sgd(model), squares, 5):
        assert everywhere(comm, all(p.grad.dtype is p.dtype for p in model.parameters()))


class Strided(nn.Module):
    """Parameters with other memory orders, or with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter((0.1 * torch.randn(12, 20)).t())
        self.permuted = nn.Parameter((0.1 * torch.randn(3, 4, 5)).permute(2, 0, 1))
        self.gappy = nn.Parameter((0.1 * torch.randn(12, 14))[:, ::2])
        self.last = nn.Parameter((0.1 * torch.randn(24))[::3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("abc,nb->nac", self.permuted, x[:, :3]).sum((1, 2))
        return ((x @ self.turned).tanh() @ self.gappy).tanh() + mixed[:, None] * self.last.sum()


@both_paths
def test_other_memory_orders(comm: MPI.Intracomm, path: str) -> None:
    model = Strided()
    assert not any(p.is_contiguous() for p in model.parameters())
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    for _ in lawful_steps(comm, model, sync, sgd(model), squares):
        assert everywhere(comm, model.turned.grad.stride() == model.turned.stride())
        assert everywhere(comm, model.permuted.grad.stride() == model.permuted.stride())


@both_paths
def test_channels_last(comm: MPI.Intracomm, path: str) -> None:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 1), nn.Tanh(), nn.Conv2d(8, 4, 3, groups=4)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 5)).to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)

    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        images = randn(generator, 4, 3, 5, 5).to(memory_format=torch.channels_last)
        return model(images).square().mean()

    for _ in lawful_steps(comm, model, sync, sgd(model), loss):
        assert everywhere(comm, all(p.grad.stride() == p.stride() for p in model.parameters()))


class Words(nn.Module):
    """Two embeddings with sparse gradients around a linear layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12, sparse=sparse)
        self.linear = nn.Linear(12, 8)
        self.bag = nn.EmbeddingBag(30, 8, mode="sum", sparse=sparse)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.linear(self.words(index).mean(1)).tanh() * self.bag(index % 30)


def embedding_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    return model(torch.randint(0, 50, (6, 5), generator=generator)).square().mean()


@both_paths
@pytest.mark.parametrize("scheme", ["exdyna", "dense"])
def test_sparse_embedding_gradients(comm: MPI.Intracomm, path: str, scheme: str) -> None:
    model = Words(sparse=True)
    sync = mpisparse.GradientSync(model, scheme=scheme, density=0.1 if scheme == "exdyna" else None, accumulate=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in lawful_steps(comm, model, sync, optimizer, embedding_loss):
        assert everywhere(comm, model.words.weight.grad.layout is torch.strided)


@both_paths
def test_sparse_gradients_train_as_dense_ones(comm: MPI.Intracomm, path: str) -> None:
    trained = []
    for sparse in (True, False):
        torch.manual_seed(5)
        model = Words(sparse)
        sync = mpisparse.GradientSync(model, density=1.0, accumulate=path)
        train_lawfully(comm, model, sync, torch.optim.SGD(model.parameters(), lr=0.5), embedding_loss)
        trained.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*trained, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


class Scaled(nn.Module):
    """Parameters with no dimension, with one element, and with none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.linear = nn.Linear(20, 3)
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.shift + self.nothing.sum()


@both_paths
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_scalars_and_empty_parameters(comm: MPI.Intracomm, path: str, density: float) -> None:
    model = Scaled()
    sync = mpisparse.GradientSync(model, density=density, accumulate=path)
    assert sync.residual.numel() == 1 + 63 + 1
    for _ in lawful_steps(comm, model, sync, sgd(model), squares):
        assert everywhere(comm, model.scale.grad is not None and model.scale.grad.shape == ())


@both_paths
def test_several_parameter_groups(comm: MPI.Intracomm, path: str) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))
    groups = [{"params": model[2].parameters(), "lr": 0.0}, {"params": model[0].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    start = model[2].weight.clone()
    for _ in lawful_steps(comm, model, sync, optimizer, squares):
        before = [p.detach().clone() for p in model[0].parameters()]
        steps = [p.grad.clone() for p in model[0].parameters()]
    assert torch.equal(model[2].weight, start)
    for p, old, grad in zip(model[0].parameters(), before, steps, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * grad)


class Buffered(nn.Module):
    """Buffers and parameters of many types and memory orders, one parameter frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.narrow = nn.Parameter(torch.randn(7).half())
        self.frozen = nn.Parameter(torch.randn(3, 5).t(), requires_grad=False)
        self.gappy = nn.Parameter(torch.randn(10)[::2])
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("hidden", torch.randn(4, 6).t(), persistent=False)
        self.register_buffer("count", torch.randint(0, 1000, ()))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).tanh() * self.narrow.float().sum() * self.gappy.sum()


@both_paths
@pytest.mark.parametrize("segment_nbytes", [1 << 30, 10])
def test_construction_broadcasts_parameters_and_buffers(comm: MPI.Intracomm, path: str, segment_nbytes: int) -> None:
    torch.manual_seed(100 + comm.rank)
    model = Buffered()
    model.norm.running_mean.fill_(comm.rank + 1)
    model.norm.num_batches_tracked.fill_(10 * (comm.rank + 1))
    start = comm.bcast([t.detach().clone() for t in [*model.parameters(), *model.buffers()]])
    strides = [t.stride() for t in [*model.parameters(), *model.buffers()]]
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path, segment_nbytes=segment_nbytes)
    now = [*model.parameters(), *model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(now, start, strict=True))
    assert [t.stride() for t in now] == strides
    sync.close()


@both_paths
def test_batch_norm(comm: MPI.Intracomm, path: str) -> None:
    """Running statistics follow each rank's own data, as in DDP without broadcast; parameters are equal."""
    torch.manual_seed(100 + comm.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 5))
    sync = mpisparse.GradientSync(model, density=0.1, accumulate=path)
    assert alike(comm, [*model.parameters(), *model.buffers()])

    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        return model(randn(generator, 4, 3, 5, 5) + comm.rank).square().mean()

    train_lawfully(comm, model, sync, sgd(model), loss)
    assert int(model[1].num_batches_tracked) == 6


@both_paths
def test_the_residual_lies_in_the_order_of_the_parameters(comm: MPI.Intracomm, path: str) -> None:
    """Each element of a known gradient is found at its position in the parameter's memory."""
    model = Strided()
    sync = mpisparse.GradientSync(model, density=1e-9, accumulate=path)  # k = 1: all but one element stay
    grads = [torch.randn(p.shape, generator=seeded(comm.rank, 0)) for p in model.parameters()]
    torch.autograd.backward(list(model.parameters()), grads)
    sync.step()
    assert sync.k == 1
    expected = torch.cat([in_memory_order(p, g) for p, g in zip(trainable(model), grads, strict=True)]).float()
    same = (sync.residual == expected).sum()
    assert int(same) >= len(expected) - sync.stats.selected
    sync.close()


def test_a_model_without_trainable_elements_is_refused(comm: MPI.Intracomm) -> None:
    frozen = nn.Linear(3, 2).requires_grad_(False)
    assert "no parameter that requires a gradient" in raised(
        comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(frozen)
    )
    empty = nn.ParameterList([torch.zeros(0, 3)])
    assert "no elements" in raised(comm, mpisparse.ConfigurationError, lambda: mpisparse.GradientSync(empty))
