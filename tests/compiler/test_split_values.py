"""What crosses a cut: integers, floats, tuples, strides, contexts, randomness, mutations."""

from __future__ import annotations

import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from paceline import _torch
from paceline.compiler import DDPOptimizer
from paceline.compiler.split.forbidden_cuts import RESHAPED, SHARED
from tests.compiler._split import MATRIX, WIDTH, Matrices, Recorder, cut_and_compare, rows
from tests.on_ranks import on_ranks

DATA_DEPENDENT = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
COUNTS = torch.tensor([2, 3])


class Symbol(Matrices):
    """A size that is an input of the graph, in every part; twice it in some."""

    def forward(self, x):
        n = x.shape[0]
        y = torch.cat([x, x]) @ self.a
        y = y @ self.b
        return (y + torch.arange(2 * n, device=x.device).unsqueeze(1)) @ self.c + n


class Item(Matrices):
    """A number that is read from an input."""

    def forward(self, x, count):
        n = count.item()
        torch._check(n >= 0)
        return x @ self.a, x.new_ones(n, WIDTH) @ self.b, x.new_ones(n + 3, WIDTH) @ self.c


class Direct(Matrices):
    """A number known only when the graph runs; parts name it."""

    def forward(self, x, counts):
        n = counts.sum().item()
        torch._check(n >= 0)
        y = x @ self.a
        return torch.cat([y, x.new_ones(n, WIDTH) @ self.b]) @ self.c, x.new_ones(n).sum()


class Indirect(Matrices):
    """Such a number in the shapes of later parts, which do not name it."""

    def forward(self, x, counts):
        n = counts.sum().item()
        torch._check(n >= 0)
        y = x.new_ones(n, WIDTH) @ self.a
        y = y @ self.b
        return (y + torch.ones_like(y)) @ self.c


class Unbound(Matrices):
    """Such a number that is nothing but a tensor's size."""

    def forward(self, x, counts):
        y = x[x.gt(0).nonzero()[:, 0]] @ self.a
        return (y @ self.b + 1) @ self.c


class Three(Matrices):
    """Made in the first part, used in the third, with another one in between."""

    def forward(self, x, counts):
        n, m = counts.tolist()
        torch._check(n >= 0)
        torch._check(m >= 0)
        y = x.new_ones(n, WIDTH) @ self.a
        z = x.new_ones(m, WIDTH) @ self.b
        return torch.cat([y, z, x.new_ones(n + m, WIDTH)]) @ self.c, x.new_ones(n).sum()


class Scale(Matrices):
    """A float attribute in several parts (pytorch#196227)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, x):
        return ((x @ self.a * self.scale) @ self.b * self.scale) @ self.c * (self.scale + 1)


class Mean(Matrices):
    """A float that is computed, and changes afterwards where it came from."""

    def forward(self, x):
        mean = x.mean()
        scale = mean.item()
        mean.add_(1)
        return ((x @ self.a * scale) @ self.b * (scale * 2)) @ self.c * scale + mean


class Tuple(Matrices):
    """A tuple of tensors, of which some part uses members and another the whole; and a shape."""

    def forward(self, x):
        y = x @ self.a
        chunks, size = torch.split(y, 2, dim=1), y.size()
        z = chunks[1] @ self.b[:2]
        return (torch.cat(chunks, dim=1) @ self.c).view(size) + z


class Mutated(Matrices):
    """A part changes what another one made."""

    def forward(self, x):
        y = x @ self.a
        y = y.add_(x @ self.b)
        return y @ self.c


class Silent(Matrices):
    """Nothing comes out of the middle but what it does to the result of the first part."""

    def forward(self, x):
        y = x @ self.a
        y.add_(x @ self.b)
        return y @ self.c


class Mapped(Matrices):
    """A parameter inside of vmap: it cannot be cut there."""

    def forward(self, x):
        y = x @ self.a
        y = torch.vmap(lambda row: torch.tanh(row @ self.b + 1) * 2)(y)
        return y @ self.c


class Random(Matrices):
    def forward(self, x):
        y = nn.functional.dropout(x @ self.a)
        return nn.functional.dropout(y @ self.b) @ self.c


class FromNothing(Matrices):
    """Parts that need no input but parameters, and operators that need nothing at all."""

    def forward(self):
        y = torch.ones(3, WIDTH, dtype=torch.float64) @ self.a
        y = torch.zeros(3, WIDTH, dtype=torch.float64) + y @ self.b
        return y @ self.c


# The options of torch.compile and the inputs; each makes one graph.
CASES = {
    Symbol: ({"dynamic": True}, [(rows(4),), (rows(7),)]),
    Item: ({}, [(rows(), torch.tensor(5)), (rows(), torch.tensor(7))]),
    Direct: ({}, [(rows(), COUNTS), (rows(), COUNTS + 2)]),
    Indirect: ({}, [(rows(), COUNTS), (rows(), COUNTS + 2)]),
    Unbound: ({}, [(rows(), COUNTS), (rows().abs(), COUNTS)]),
    Three: ({}, [(rows(), COUNTS), (rows(), COUNTS + 2)]),
    Mean: ({}, [(rows(4),), (rows(4) * 3,)]),
    Tuple: ({"dynamic": True}, [(rows(4),), (rows(7),)]),
    Mutated: ({}, [(rows(4),)]),
    Mapped: ({}, [(rows(4),)]),
    FromNothing: ({}, [()]),
    # Numbers are drawn in the order of the whole graph.
    Random: ({}, [(rows(4),)]),
}


def _crosses(rank, size, backend, kinds):
    with torch._dynamo.config.patch(**DATA_DEPENDENT):
        for kind in kinds:
            options, batches = CASES[kind]
            optimizer, recorder = cut_and_compare(kind(), *batches, backend=backend, **options)
            assert [bucket.size for bucket in optimizer.buckets] == [MATRIX] * 3, kind
            assert len(recorder.graphs) == 3, kind
            assert counters["stats"]["unique_graphs"] == 1, kind


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.full), "aot_eager"])
def test_what_crosses_a_cut(ranks, backend):
    ranks(_crosses, backend, list(CASES), world_size=1)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_crosses_a_cut_in_inductor(ranks):
    ranks(_crosses, "inductor", [Symbol, Three, Mean, Tuple, Mutated], world_size=1, timeout=500)


@on_ranks(world_size=1)
def test_parts_are_given_the_integers_that_their_shapes_depend_on(rank, size):
    """Each part is given the integers that its shapes depend on, also if it does not name them."""
    with torch._dynamo.config.patch(**DATA_DEPENDENT):
        for kind in (Symbol, Indirect, Unbound):
            options, batches = CASES[kind]
            _, recorder = cut_and_compare(kind(), *batches, **options)
            for inputs in recorder.examples[1:]:
                assert [type(value) for value in inputs].count(torch.SymInt) == 1, kind


@on_ranks(world_size=1)
def test_the_backward_of_a_part_knows_its_forward(rank, size):
    """What AOTAutograd has noted of a part is there when its backward is compiled, after all other forwards."""
    seen = []

    def note(gm, example_inputs):
        seen.append((TracingContext.get(), TracingContext.get().fw_metadata))
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=lambda gm, inputs: make_boxed_func(gm.forward))
    cut_and_compare(Symbol(), (rows(),), backend=backend, dynamic=True)
    assert len(seen) == 3
    assert all(context.fw_metadata is noted for context, noted in seen)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(world_size=1)
def test_a_float_attribute_in_several_parts(rank, size, backend):
    model = Scale()
    optimizer, recorder = cut_and_compare(model, (rows(),), backend=backend)
    assert len(optimizer.buckets) == 3
    for scale in (0.7, 0.9):
        model.scale = scale
        _, recorder = cut_and_compare(model, (rows(),), backend=backend, dynamic=True)
        # Nowhere as a number: as a tensor of Dynamo's, which each part reads.
        assert recorder.calls("item") == [1, 1, 1]
        assert not any(isinstance(value, torch.SymFloat) for inputs in recorder.examples for value in inputs)


@on_ranks(world_size=1)
def test_a_region_that_cannot_be_interrupted_moves_the_cut(rank, size):
    optimizer, recorder = cut_and_compare(Mapped(), (rows(),), backend="aot_eager")
    assert [bool(cut.moved_by) for cut in optimizer.cuts] == [True, False]
    assert "vmap" in str(optimizer.cuts[0])
    assert recorder.calls("_vmap_increment_nesting") == recorder.calls("_vmap_decrement_nesting") == [0, 1, 0]


class View(Matrices):
    """A later part would change a view of what it uses as well."""

    def forward(self, x):
        k = x @ self.a
        mask = x > 0
        row = mask[0]
        y = k @ self.b
        row.fill_(False)
        return (y * mask) @ self.c


class Chunks(Matrices):
    """The same with members of a tuple."""

    def forward(self, x):
        y = x @ self.a
        whole = x.clone()
        first, second = whole.chunk(2)
        z = y @ self.b
        first.mul_(2)
        return (z + torch.cat([second, first]) * whole) @ self.c


class Reshaped(Matrices):
    """A later part would change the shape of what it is given."""

    def forward(self, x):
        h = x @ self.a
        y = x @ self.b
        h.unsqueeze_(0)
        return (y + h) @ self.c


class Unsqueezed(Matrices):
    """The same with room for a cut in front of it."""

    def forward(self, x):
        k = x @ self.a
        h = x + 1
        y = k @ self.b
        h.unsqueeze_(0)
        return (y + h) @ self.c


@on_ranks(world_size=1)
def test_memory_that_is_changed_does_not_cross_in_two_values(rank, size):
    # A cut is moved where there is room for it in front; else its part is one with the part before.
    moved = {View: [SHARED, ""], Chunks: [SHARED, ""], Unsqueezed: [RESHAPED, ""], Reshaped: [""]}
    for kind, reasons in moved.items():
        for backend in ("eager", "aot_eager"):
            optimizer, _ = cut_and_compare(kind(), (rows(),), backend=backend)
            assert [cut.moved_since for cut in optimizer.cuts] == reasons, kind


@on_ranks(world_size=1)
def test_nor_does_it_in_a_graph_that_dynamo_has_not_captured(rank, size):
    for model in (View(), Chunks()):
        for backend in ("eager", "aot_eager"):
            optimizer = DDPOptimizer(MATRIX, Recorder(backend))
            run = optimizer.compile_fn(torch.fx.symbolic_trace(model), [rows()])
            assert [cut.moved_since for cut in optimizer.cuts if cut.moved_since] == [SHARED], type(model)
            assert torch.equal(run(rows()), model(rows())), type(model)


class Late(Matrices):
    """The last operators work in place: nothing comes out of them by themselves."""

    def forward(self, x):
        y = x @ self.a
        z = y @ self.b
        z.addmm_(x, self.c)
        return z


@on_ranks(world_size=1)
def test_a_part_has_an_output(rank, size):
    for backend in ("eager", "aot_eager"):
        optimizer, _ = cut_and_compare(Silent(), (rows(),), backend=backend)
        # It has become one with the first.
        assert [bucket.size for bucket in optimizer.buckets] == [2 * MATRIX, MATRIX]
    late = Late()
    optimizer, _ = cut_and_compare(late, (rows(),))
    assert [bucket.size for bucket in optimizer.buckets] == [MATRIX, 2 * MATRIX]
    (cut,) = optimizer.cuts
    assert (cut.moved_by, cut.moved_since) == (1, "the part would have no output")
    assert "1 operator(s) earlier than needed, since the part would have no output" in str(cut)


# -- strides ---------------------------------------------------------------------------------------------


# The bytes of one filter of `Images`.
FILTER = 4 * 4 * 9 * 8


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, bias=False) for _ in range(3))
        self.double()

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).transpose(2, 3))


class Transposed(Matrices):
    def forward(self, x):
        y = (x @ self.a).t().relu()
        return (y.t() @ self.b).t() @ x @ self.c


def _chooses_layouts(gm, example_inputs):
    """A compiler that hands out images with channels last, whatever they were, and says so, as inductor may."""

    def lay_out(tensor):
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    output = next(iter(gm.graph.find_nodes(op="output")))
    said = TracingContext.get().output_strides
    if said is not None:
        values = [getattr(node, "meta", {}).get("val") for node in output.args[0]]
        said.extend(lay_out(value).stride() if isinstance(value, torch.Tensor) else None for value in values)

    def run(args):
        return [lay_out(result) for result in gm(*args)]

    run._boxed_call = True
    return run


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.full), True])
@on_ranks(world_size=1)
def test_parts_are_compiled_for_the_strides_they_get(rank, size, dynamic):
    backend = aot_autograd(fw_compiler=_chooses_layouts, bw_compiler=lambda gm, inputs: make_boxed_func(gm.forward))
    cut = functools.partial(cut_and_compare, backend=backend, dynamic=dynamic)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = Images().to(memory_format=memory_format)
        images = [torch.randn(2, 4, n, n, dtype=torch.float64).to(memory_format=memory_format) for n in (9, 10)]
        _, recorder = cut(model, *[(batch,) for batch in images], cap=FILTER)
        # Strides of images that were handed over are symbols, not numbers: one graph for both sizes.
        assert len(recorder.graphs) == (3 if dynamic else 6)
        for pairs in recorder.strides[:3] if dynamic else recorder.strides:
            assert all(taken == found for taken, found in pairs)
        image, filters = sorted(taken for taken, _ in recorder.strides[1])[::-1]
        assert image[1] == 1
        assert (filters[1] == 1) == (memory_format is torch.channels_last)
        assert all(isinstance(value, (FakeTensor, torch.SymInt)) for inputs in recorder.examples for value in inputs)
    _, recorder = cut(Transposed(), (rows(WIDTH),))
    assert all(taken == found for pairs in recorder.strides for taken, found in pairs)


@pytest.mark.full
@pytest.mark.timeout(600)
@on_ranks(world_size=1, timeout=500)
def test_convolutions_and_transposes_in_inductor(rank, size):
    small, large = (torch.randn(2, 4, n, n, dtype=torch.float64) for n in (9, 10))
    backend = _torch.find_backend("inductor", options={"keep_output_stride": False})
    cut = functools.partial(cut_and_compare, backend=backend)
    with torch.no_grad():
        _, recorder = cut(Images(), (small,), (large,), cap=FILTER, dynamic=True)
        assert len(recorder.graphs) == 3
    last = {"memory_format": torch.channels_last}
    for model, x, cap in (
        (Images(), small, FILTER),
        (Images().to(**last), small.to(**last), FILTER),
        (Transposed(), rows(WIDTH), MATRIX),
    ):
        _, recorder = cut(model, (x,), cap=cap)
        assert len(recorder.graphs) == 3
        assert all(taken == found for pairs in recorder.strides for taken, found in pairs)
