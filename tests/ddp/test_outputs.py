"""What passes through the wrapper: inputs and outputs of any form."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.reference import DDP, assert_in_sync, batch, compare_with_reference, ours_only


@dataclasses.dataclass
class _Data:
    main: torch.Tensor
    more: list
    label: str = "kept"


@dataclasses.dataclass(frozen=True)
class _FrozenData:
    main: torch.Tensor
    more: tuple


_Named = collections.namedtuple("_Named", ["main", "more"])


class _Arbitrary:
    def __init__(self, main, more):
        self.main = main
        self.more = more


class _ModelOutput(collections.OrderedDict):
    """Like the outputs of transformers: a dict with attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


MAKERS = {
    "tuple": lambda a, b: (a, (b, None, 3)),
    "list": lambda a, b: [a, [b]],
    "dict": lambda a, b: {"main": a, "more": {"deep": [b]}},
    "dataclass": lambda a, b: _Data(a, [b]),
    "frozen_dataclass": lambda a, b: _FrozenData(a, (b,)),
    "namedtuple": lambda a, b: _Named(a, [b]),
    "arbitrary": lambda a, b: _Arbitrary(a, {"deep": b}),
    "ordered_dict": lambda a, b: _ModelOutput(main=a, more=b),
}


class _Nested(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.a = nn.Linear(4, 2)
        self.b = nn.Linear(4, 2)
        self.kind = kind

    def forward(self, x):
        x = self.body(x).tanh()
        return MAKERS[self.kind](self.a(x), self.b(x))


def _main_and_more(out):
    if isinstance(out, dict):
        main, more = out["main"], out["more"]
    elif isinstance(out, (tuple, list)):
        main, more = out[0], out[1]
    else:
        main, more = out.main, out.more
    while not isinstance(more, torch.Tensor):
        more = next(iter(more.values())) if isinstance(more, dict) else more[0]
    return main, more


@pytest.mark.parametrize(
    ("options", "with_more"),
    [
        ({}, True),
        pytest.param({}, False, marks=ours_only),
        pytest.param({"find_unused_parameters": True}, False, marks=ours_only),
        pytest.param({"static_graph": True}, False, marks=ours_only),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=ours_only if k == "frozen_dataclass" else ()) for k in MAKERS])
@on_ranks()
def test_nested_outputs(rank, world_size, kind, options, with_more):
    """Outputs may have any form, and the loss may leave one of them out."""

    def step(model, r, i):
        out = model(batch(r, i))
        assert type(out) is type(MAKERS[kind](torch.zeros(1), torch.zeros(1)))
        main, more = _main_and_more(out)
        (main.square().mean() + (more.square().mean() if with_more else 0)).backward()

    compare_with_reference(rank, world_size, lambda: _Nested(kind), step, **options)


@on_ranks()
def test_arguments_and_other_outputs_pass_unchanged(rank, world_size):
    """What the module returns that is not a tensor is returned as it is."""

    class _Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.token = object()

        def forward(self, x, *, scale=1.0, **more):
            return self.linear(x) * scale, self.token, more

    ddp = DDP(_Passes())
    out, token, more = ddp(batch(rank).float(), scale=2.0, name="x", none=None)
    assert token is ddp.module.token
    assert more == {"name": "x", "none": None}
    out.sum().backward()
    assert_in_sync(ddp.module)


@on_ranks()
def test_a_module_that_returns_nothing(rank, world_size):
    class _Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            self.loss = self.linear(x).square().mean()

    model = _Remembers()
    ddp = DDP(model)
    for i in range(2):
        assert ddp(batch(rank, i).float()) is None
        model.loss.backward()
        assert_in_sync(model)
        ddp.zero_grad()


@on_ranks(
    allow_warnings=(
        ("find_unused_parameters=True was specified", UserWarning),
        # What torch's RPC does with the default group.
        ("You are using a Backend", UserWarning),
    )
)
def test_rref_outputs(rank, world_size):
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:0", num_worker_threads=2)
    rpc.init_rpc(f"alone{rank}", rank=0, world_size=1, rpc_backend_options=options)
    try:

        class _Remote(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 2)

            def forward(self, x):
                return rpc.RRef(self.linear(x))

        ddp = DDP(_Remote(), find_unused_parameters=True)
        for i in range(2):
            ddp(batch(rank, i).float()).local_value().square().sum().backward()
            assert_in_sync(ddp.module)
            ddp.zero_grad()
    finally:
        rpc.shutdown(graceful=False)
