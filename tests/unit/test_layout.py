"""Parameters of any layout as one flat vector: read in memory order, published through views, or refused with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpisparse.backends import device
from mpisparse.backends.flat import add_sparse_, in_order, memory_order, zeros
from mpisparse.backends.reference import BF16, FP16, FP32
from mpisparse.errors import ConfigurationError
from mpisparse.model.layout import Layout, collect_gradients
from mpisparse.model.published import Published


class Model(nn.Module):
    """Parameters p0, p1, ... over given tensors, with their strides."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            self.register_parameter(f"p{i}", nn.Parameter(tensor))


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return distinct values that fit any type."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) % 251 + 1).to(dtype).reshape(shape)


SHAPES: dict[str, torch.Tensor] = {
    "vector": numbered(7),
    "scalar": numbered(),
    "channels_last": numbered(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": numbered(2, 3, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d),
    "transposed": numbered(4, 3).t(),
    "permuted": numbered(2, 3, 4).permute(2, 0, 1),
    "every_other": numbered(6, 8)[:, ::2],
    "every_other_transposed": numbered(8, 6).t()[::2],
    "expanded": torch.ones(1).expand(4),
    "inside_another": numbered(100)[10:22].view(3, 4),
    "odd_stride_behind": torch.empty_strided((3, 1), (1, 7)).fill_(2),
    "odd_stride_before": torch.empty_strided((1, 3), (9, 1)).fill_(2),
    "single": torch.empty_strided((1, 1), (5, 3)).fill_(2),
    "empty": numbered(2, 0, 3),
    "empty_vector": numbered(0),
}


@pytest.fixture(scope="module", params=["numpy", "native"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "native":
        pytest.importorskip("mpisparse._cpu", exc_type=ImportError)
    return device.load_backend(request.param)


def flatten(layout: Layout, tensors: list[torch.Tensor | None]) -> torch.Tensor:
    """Return the expected flat vector: each parameter's elements in memory order, by plain indexing."""
    flat = torch.zeros(layout.size, dtype=torch.float64)
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        if tensor is not None:
            for at in np.ndindex(*slot.shape):
                place = sum(i * s for i, s in zip(at, slot.stride, strict=True))
                flat[slot.begin + place] = float(tensor.to_dense()[at])
    return flat


def accumulated(backend: Any, layout: Layout, grads: list[torch.Tensor | None]) -> torch.Tensor:
    """Return the accumulator after adding dense and sparse gradients to zero, as a step does."""
    collected = collect_gradients(layout, grads)
    acc = torch.zeros(layout.size)
    for slot, grad in collected.sparse:
        assert add_sparse_(acc, slot, grad) == -1
    backend.accumulate_select(acc.numpy(), collected.pointers, collected.ends, collected.kinds, 0, 0, 0.0)
    return acc.double()


@pytest.mark.parametrize("name", SHAPES)
def test_slots_are_dense(name: str) -> None:
    """A slot's strides visit each element once, and are the parameter's own if it is dense in memory."""
    tensor = SHAPES[name]
    (slot,) = Layout(Model(tensor, numbered(1))).slots[:1]
    places = [sum(i * s for i, s in zip(at, slot.stride, strict=True)) for at in np.ndindex(*slot.shape)]
    assert sorted(places) == list(range(tensor.numel()))
    assert (slot.begin, slot.end, slot.shape) == (0, tensor.numel(), tuple(tensor.shape))
    if not name.startswith(("every", "expanded")):
        assert slot.stride == tensor.stride()


@pytest.mark.parametrize("order", ["own", "contiguous", "reversed", "gaps", "expanded"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_read_in_the_parameters_order(backend: Any, name: str, order: str) -> None:
    """For any layout of the parameter and of its gradient; neighbouring elements do not change."""
    layout = Layout(Model(numbered(3), SHAPES[name], numbered(2)))
    shape = SHAPES[name].shape
    grad = numbered(*shape)
    if order == "own":
        grad = torch.empty_strided(shape, memory_order(SHAPES[name])).copy_(grad)
    elif order == "reversed":
        grad = torch.empty(shape[::-1]).permute(tuple(reversed(range(len(shape))))).copy_(grad)
    elif order == "gaps":
        grad = torch.zeros(*shape, 2)[..., 1].copy_(grad)
    elif order == "expanded":
        grad = torch.tensor(5.0).expand(shape)
    grads: list[torch.Tensor | None] = [-numbered(3), grad, -numbered(2)]
    assert torch.equal(accumulated(backend, layout, grads), flatten(layout, grads))


@pytest.mark.parametrize("name", ["vector", "scalar", "channels_last", "permuted", "odd_stride_behind", "odd_stride_before"])
def test_gradients_in_order_are_not_copied(name: str) -> None:
    """A gradient as torch creates it is read in place."""
    model = Model(SHAPES[name].clone(memory_format=torch.preserve_format))
    layout = Layout(model)
    model.p0.square().sum().backward()
    grad = model.p0.grad
    assert in_order(layout.slots[0], grad) is grad
    collected = collect_gradients(layout, [grad])
    assert collected.pointers.tolist() == [grad.data_ptr()]
    assert collected.alive[0] is grad


def test_strides_of_size_one_do_not_matter() -> None:
    slot = Layout(Model(SHAPES["odd_stride_behind"])).slots[0]
    assert slot.matches(torch.empty_strided((3, 1), (1, 1)))
    assert not slot.matches(torch.empty_strided((3, 1), (2, 1)))
    assert not Layout(Model(numbered(3, 2))).slots[0].matches(numbered(2, 3).t())


def mixed() -> list[torch.Tensor]:
    """Build runs of equal types: float32 twice, float16, bfloat16 twice, float64, float32 again."""
    types = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.bfloat16, torch.float64, torch.float32)
    shapes = ((3, 2), (), (5,), (2, 2), (0,), (4,), (1,))
    return [numbered(*shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]


def test_mixed_types_are_read(backend: Any) -> None:
    """Each is read in its own type, float64 through float32; a missing gradient adds nothing."""
    layout = Layout(Model(*mixed()))
    assert layout.kinds.tolist() == [FP32, FP32, FP16, BF16, BF16, FP32, FP32]
    assert layout.ends.tolist() == [6, 7, 12, 16, 16, 20, 21]
    grads: list[torch.Tensor | None] = [-p for p in mixed()]
    assert torch.equal(accumulated(backend, layout, grads), flatten(layout, grads))
    for absent in range(len(grads)):
        some = [None if i == absent else grad for i, grad in enumerate(grads)]
        assert torch.equal(accumulated(backend, layout, some), flatten(layout, some))
        assert collect_gradients(layout, some).pointers[absent] == 0
    assert not accumulated(backend, layout, [None] * len(grads)).any()


def test_float64_is_rounded_once(backend: Any) -> None:
    layout = Layout(Model(torch.zeros(3, dtype=torch.float64)))
    grad = torch.tensor([0.1, 1 + 2.0**-30, -1e-50], dtype=torch.float64)
    assert torch.equal(accumulated(backend, layout, [grad]), grad.float().double())


def test_sparse_gradients(backend: Any) -> None:
    """Gradients of an embedding with a repeated row, and one sparse in all dimensions, together with dense ones."""
    rows = torch.sparse_coo_tensor(torch.tensor([[4, 1, 4]]), numbered(3, 2), (5, 2), check_invariants=True)
    points = torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), numbered(2), (3, 2), check_invariants=True)
    doubles = torch.sparse_coo_tensor(torch.tensor([[1]]), numbered(1, 3).double(), (2, 3), check_invariants=True)
    for tensor in (numbered(5, 2), numbered(2, 5).t()):
        layout = Layout(Model(numbered(2), tensor, numbered(3, 2), numbered(2, 3).double()))
        grads: list[torch.Tensor | None] = [numbered(2), rows, points, doubles]
        collected = collect_gradients(layout, grads)
        assert [slot.name for slot, _ in collected.sparse] == ["p1", "p2", "p3"]
        assert (collected.pointers == 0).tolist() == [False, True, True, True]
        assert torch.equal(accumulated(backend, layout, grads), flatten(layout, grads))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_gradients_are_found(backend: Any, bad: float) -> None:
    layout = Layout(Model(*mixed()))
    grads: list[torch.Tensor | None] = [-p for p in mixed()]
    assert collect_gradients(layout, grads).first_nonfinite(backend) == -1
    for name, element, flat in (("p6", 0, 20), ("p5", 2, 18), ("p3", 3, 15), ("p2", 0, 7), ("p0", 5, 5)):
        grad = grads[int(name[1])]
        assert grad is not None
        grad.view(-1)[element] = bad
        assert collect_gradients(layout, grads).first_nonfinite(backend) == flat
        assert layout.name_at(flat) == name


def test_nonfinite_sparse_gradients_are_found(backend: Any) -> None:
    layout = Layout(Model(numbered(3), numbered(4, 2)))
    for value, index in ((1.0, -1), (torch.inf, 3), (torch.nan, 3)):
        rows = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.tensor([[1.0, value]]), (4, 2), check_invariants=True)
        collected = collect_gradients(layout, [numbered(3), rows])
        assert collected.first_nonfinite(backend) == index
        assert add_sparse_(torch.zeros(11), *collected.sparse[0]) == index
    points = torch.sparse_coo_tensor(torch.tensor([[2], [1]]), torch.tensor([torch.nan]), (4, 2), check_invariants=True)
    assert add_sparse_(torch.zeros(11), layout.slots[1], points.coalesce()) == 3


@pytest.mark.parametrize("name", SHAPES)
def test_published_through_views(backend: Any, name: str) -> None:
    """The mean at some flat positions appears at those elements of the parameters' views, and is cleared again."""
    layout = Layout(Model(numbered(3), SHAPES[name], numbered(2)))
    published = Published(layout, backend)
    assert len(published.runs) == 1
    assert [tuple(v.shape) for v in published.views] == [slot.shape for slot in layout.slots]
    for start in (0, 1, 2):
        union = np.arange(start, layout.size, 3)
        mean = (union + 1).astype(np.float32)
        acc = np.ones(layout.size, dtype=np.float32)
        published.write(union, mean, acc)
        assert not mean.any()
        assert (acc == 1).all()
        expected = torch.zeros(layout.size, dtype=torch.float64)
        expected[torch.from_numpy(union)] = torch.from_numpy(union + 1).double()
        assert torch.equal(flatten(layout, list(published.views)), expected)
    published.clear()
    assert not any(view.any() for view in published.views)


def test_published_in_runs_of_equal_types(backend: Any) -> None:
    """One buffer per run; each value is rounded to its parameter's type, and the rounding error is returned."""
    layout = Layout(Model(*mixed()))
    published = Published(layout, backend)
    assert [(run.begin, run.end) for run in published.runs] == [(0, 7), (7, 12), (12, 16), (16, 20), (20, 21)]
    assert [view.dtype for view in published.views] == [p.dtype for p in mixed()]
    union = np.array([0, 6, 7, 11, 12, 15, 16, 20])
    value = 1 + 2.0**-12 + 2.0**-20
    mean = np.full(8, value, dtype=np.float32)
    acc = np.zeros(21, dtype=np.float32)
    published.write(union, mean, acc)
    assert acc[union].tolist() == mean.tolist() == [0, 0, value - 1, value - 1, value - 1, value - 1, 0, 0]
    expected = np.zeros(21)
    expected[union] = [value, value, 1, 1, 1, 1, value, value]
    assert flatten(layout, list(published.views)).tolist() == expected.tolist()
    published.write(union[:0], mean[:0], acc)
    assert not flatten(layout, list(published.views)).any()


def test_published_clears_only_what_it_must(backend: Any) -> None:
    """It clears its last union, or everything after somebody wrote into a view or it was filled."""
    layout = Layout(Model(numbered(4), numbered(3, dtype=torch.float16)))
    published = Published(layout, backend)
    published.write(np.array([1, 5]), np.array([2, 3], dtype=np.float32), np.zeros(7, dtype=np.float32))
    for run in published.runs:
        run.buffer.numpy()[0] = 9  # behind torch's back: a clear of the union alone leaves it
    published.clear()
    assert flatten(layout, list(published.views)).tolist() == [9, 0, 0, 0, 9, 0, 0]
    published.views[1][2] = 4
    published.clear()
    assert not any(run.buffer.any() for run in published.runs)
    published.whole().fill_(9)
    published.write(range(7), None, np.zeros(7, dtype=np.float32))
    assert all((run.buffer == 9).all() for run in published.runs)
    published.clear()
    assert not any(run.buffer.any() for run in published.runs)
    published.write(np.array([0]), np.array([1], dtype=np.float32), np.zeros(7, dtype=np.float32))
    published.clear()
    assert not any(run.buffer.any() for run in published.runs)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_zeros(count: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        flat = zeros(count, dtype)
        assert (flat.dtype, tuple(flat.shape)) == (dtype, (count,))
        assert not flat.any()


def test_a_run_without_elements(backend: Any) -> None:
    """A parameter without elements whose type differs from its neighbours'."""
    layout = Layout(Model(numbered(2), numbered(0, dtype=torch.float16), numbered(2)))
    published = Published(layout, backend)
    published.write(np.array([1, 2]), np.array([5, 6], dtype=np.float32), np.zeros(4, dtype=np.float32))
    assert flatten(layout, list(published.views)).tolist() == [0, 5, 6, 0]
    published.clear()
    assert not flatten(layout, list(published.views)).any()


def test_layout_describes_and_names() -> None:
    shared = nn.Linear(3, 2, bias=False)
    model = nn.ModuleDict({"a": shared, "b": nn.Linear(2, 2).half(), "c": shared, "z": Model(numbered(0))})
    model["b"].bias.requires_grad_(False)
    layout = Layout(model)
    assert layout.describe() == ["a.weight [2, 3] float32 [3, 1]", "b.weight [2, 2] float16 [2, 1]", "z.p0 [0] float32 [1]"]
    assert layout.size == 10
    assert [id(p) for p in layout.frozen] == [id(model["b"].bias)]
    assert [layout.name_at(i) for i in (0, 5, 6, 9)] == ["a.weight", "a.weight", "b.weight", "b.weight"]
    assert Layout(Model(numbered(0), numbered(2))).name_at(0) == "p1"
    assert Layout(Model(numbered(2, 3))).describe() != Layout(Model(numbered(3, 2).t())).describe()


def frozen(tensor: torch.Tensor) -> nn.Module:
    return Model(tensor).requires_grad_(False)


def test_whole_numbers_cannot_be_trained_and_are_left_out() -> None:
    model = Model(numbered(3))
    model.register_parameter("whole", nn.Parameter(torch.zeros(5, dtype=torch.int32), requires_grad=False))
    layout = Layout(model)
    assert (layout.size, len(layout.slots)) == (3, 1)
    assert [id(p) for p in layout.frozen] == [id(model.whole)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Model(torch.zeros(2, dtype=torch.complex64)),
            "p0 is torch.complex64; supported are float32, float16, bfloat16",
        ),
        (
            lambda: Model(torch.zeros(2), torch.zeros(2).to(torch.float8_e5m2)),
            "p1 is torch.float8_e5m2; supported are float32",
        ),
        (lambda: nn.LazyLinear(3), "parameter weight is not initialised; run one forward pass of the model first"),
        (lambda: Model(torch.zeros(2, device="meta")), "parameter p0 is on meta; move the model to the CPU"),
        (lambda: frozen(numbered(3)), "Model has no parameter that requires a gradient; nothing would be exchanged"),
        (lambda: nn.ReLU(), "ReLU has no parameter that requires a gradient"),
        (lambda: Model(numbered(0), numbered(3, 0)), "the trainable parameters of Model have no elements"),
    ],
)
def test_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Layout(make())
    assert said in str(caught.value)
