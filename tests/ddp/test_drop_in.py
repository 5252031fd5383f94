"""Code written for torch's class runs with the import changed."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as StockDDP

from tests.on_ranks import on_ranks
from tests.reference import DDP, assert_in_sync, batch, compare_with_reference, mlp, ours_only, square

# -- the constructor -----------------------------------------------------------------------------------------


# Arguments that torch's class has got since 2.13 (docs/versions.md). They come last there.
NEWER = ["lazy_bucket_allocation"]


@ours_only
def test_constructor_signature_is_torch_s_to_the_letter():
    ours, stock = inspect.signature(DDP.__init__), inspect.signature(StockDDP.__init__)
    theirs = [name for name in stock.parameters if name not in NEWER]
    assert list(stock.parameters) in (theirs, theirs + NEWER)
    # What is new comes after all of torch's, and only by name.
    assert list(ours.parameters) == [*theirs, "verify_every"]
    assert ours.parameters["verify_every"].kind is inspect.Parameter.KEYWORD_ONLY
    for name in theirs:
        parameter = stock.parameters[name]
        assert ours.parameters[name].default == parameter.default, name
        assert ours.parameters[name].kind == parameter.kind, name
    assert len(theirs) - 1 == 20


METHODS = [
    "forward",
    "train",
    "no_sync",
    "join",
    "join_hook",
    "register_comm_hook",
    "scatter",
    "gather",
    "to_kwargs",
    "_register_buffer_comm_hook",
    "_register_builtin_comm_hook",
    "_register_fused_optim",
    "_set_params_and_buffers_to_ignore_for_model",
    "_update_process_group",
]


@pytest.mark.parametrize("name", METHODS)
def test_method_signature_is_torch_s(name):
    ours, stock = inspect.signature(getattr(DDP, name)), inspect.signature(getattr(StockDDP, name))
    assert list(ours.parameters) == list(stock.parameters)
    for parameter in stock.parameters.values():
        default = ours.parameters[parameter.name].default
        # An enum of ours stands in for an enum of torch's by its members' names.
        assert getattr(default, "name", default) == getattr(parameter.default, "name", parameter.default)


@pytest.mark.parametrize("option", ["check_reduction", "broadcast_buffers"])
@on_ranks()
def test_deprecated_arguments_warn_and_work(rank, world_size, option):
    with pytest.warns(FutureWarning, match=option):
        ddp = DDP(mlp(), **{option: True})
    ddp(batch(rank).float()).sum().backward()
    assert_in_sync(ddp.module)


# -- state dict, copies --------------------------------------------------------------------------------------


@on_ranks()
def test_state_dict_prefix_and_loading(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = DDP(model)
    names = list(ddp.state_dict())
    assert names == [f"module.{name}" for name in model.state_dict()]
    # It can be loaded into another wrapper, into the bare module, and back.
    other = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    ddp(batch(rank).float()).sum().backward()
    other.load_state_dict(ddp.state_dict())
    bare = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    bare.load_state_dict({name.removeprefix("module."): value for name, value in ddp.state_dict().items()})
    for p, q in zip(other.parameters(), bare.parameters(), strict=True):
        assert torch.equal(p, q)
    file = io.BytesIO()
    torch.save(ddp.state_dict(), file)
    file.seek(0)
    ddp.load_state_dict(torch.load(file, weights_only=True))
    ddp(batch(rank).float()).sum().backward()
    assert_in_sync(model)


@on_ranks(world_size=1)
def test_names_of_parameters_and_modules(rank, world_size):
    ddp = DDP(mlp())
    assert next(name for name, _ in ddp.named_parameters()) == "module.0.weight"
    assert [name for name, _ in ddp.named_modules()][:2] == ["", "module"]
    assert list(ddp.children()) == [ddp.module]
    assert "(module): Sequential" in repr(ddp)


@on_ranks()
def test_pickling(rank, world_size):
    torch.manual_seed(rank)
    ddp = DDP(mlp(), gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    ddp(batch(rank).float()).sum().backward()
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is DDP
    for p, q in zip(ddp.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q)
    loaded.zero_grad()
    loaded(batch(rank, 1).float()).square().sum().backward()
    assert_in_sync(loaded.module)
    # The copy is independent of the first.
    ddp.zero_grad()
    ddp(batch(rank, 2).float()).square().sum().backward()
    assert_in_sync(ddp.module)
    assert not torch.equal(ddp.module[0].weight.grad, loaded.module[0].weight.grad)


@on_ranks()
def test_deepcopy(rank, world_size):
    torch.manual_seed(rank)
    ddp = DDP(mlp())
    ddp(batch(rank).float()).square().sum().backward()
    twin = copy.deepcopy(ddp)
    for i in range(2):
        for wrapper in (ddp, twin):
            wrapper.zero_grad()
            wrapper(batch(rank, i).float()).square().sum().backward()
            assert_in_sync(wrapper.module)
    for p, q in zip(ddp.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.data_ptr() != q.data_ptr()
        assert torch.equal(p.grad, q.grad)
        assert p.grad.data_ptr() != q.grad.data_ptr()
    # The inner module can be copied by itself, too.
    lone = copy.deepcopy(ddp.module)
    lone(batch(rank).float()).sum().backward()


@on_ranks(world_size=1)
def test_train_and_eval_reach_the_module(rank, world_size):
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    assert ddp.train(False) is ddp
    assert not ddp.training
    assert not ddp.module[1].training
    ddp.train()
    assert ddp.module[1].training
    ddp.eval()
    assert not ddp.module.training


@on_ranks(world_size=1)
def test_to_kwargs(rank, world_size):
    """``to_kwargs`` does for the CPU what torch's does."""
    stock, ours = (
        wrapper(nn.Linear(2, 2)).to_kwargs((torch.ones(2), [torch.zeros(1)]), {"k": torch.zeros(3)}, 0)
        for wrapper in (StockDDP, DDP)
    )
    torch.testing.assert_close(ours, stock)
    assert [type(part) for part in ours] == [type(part) for part in stock]


@ours_only
@on_ranks(world_size=1)
def test_the_names_of_torch_s_class_lead_to_parts_that_there_are(rank, world_size):
    ddp = DDP(mlp())
    found = 0
    for owner in (ddp, ddp.reducer):
        for names in map(vars, type(owner).__mro__):
            for method in filter(inspect.isfunction, names.values()):
                if method.__qualname__.startswith("_leads_to."):
                    assert callable(inspect.getclosurevars(method).nonlocals["find"](owner))
                    found += 1
    assert found > 5


@ours_only
@on_ranks()
def test_the_first_backward_of_a_static_graph_needs_no_flush(rank, world_size):
    """Lightning calls ``_delay_all_reduce`` after it, if it does not optimize automatically."""
    ddp = DDP(nn.Linear(2, 1, bias=False), static_graph=True)
    ddp(torch.ones(1, 2) * (rank + 1)).sum().backward()
    mean = torch.full((1, 2), 1.5)
    assert torch.equal(ddp.module.weight.grad, mean)
    assert ddp.reducer._delay_all_reduce() is None
    assert torch.equal(ddp.module.weight.grad, mean)


# -- device mesh ---------------------------------------------------------------------------------------------


@on_ranks()
def test_device_mesh(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))

    def wrap(model):
        ddp = DDP(model, device_mesh=mesh)
        assert ddp.process_group is mesh.get_group()
        return ddp

    compare_with_reference(rank, world_size, mlp, square, wrap=wrap)


@on_ranks(world_size=4)
def test_one_dimension_of_a_mesh(rank, world_size):
    """One dimension of a larger mesh: gradients are averaged over that one only."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "other"))
    model = nn.Linear(4, 2)
    ddp = DDP(model, device_mesh=mesh["replicate"])
    ddp(batch(rank).float()).sum().backward()
    mates = dist.get_process_group_ranks(mesh.get_group("replicate"))
    want = sum(batch(r).float().sum(0) for r in mates) / 2
    torch.testing.assert_close(model.weight.grad, want.expand(2, 4))


# -- with the rest of torch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "foreach", "fused"])
@on_ranks()
def test_optimizers_and_clipping(rank, world_size, kind):
    """Optimizers and clipping over the wrapper's parameters behave as with torch's class."""
    make = {
        "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
        "foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
        "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    }[kind]
    results = []
    for wrapper in (StockDDP, DDP):
        torch.manual_seed(0)
        ddp = wrapper(mlp())
        optimizer = make(ddp.parameters())
        for i in range(5):
            optimizer.zero_grad()
            ddp(batch(rank, i).float()).square().mean().backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()
        results.append([p.detach().clone() for p in ddp.parameters()])
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)


@on_ranks()
def test_autocast(rank, world_size):
    torch.manual_seed(0)
    model = mlp()
    ddp = DDP(model)
    for i in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch(rank, i).float()).float().square().mean()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        assert_in_sync(model)
        ddp.zero_grad()


@on_ranks()
def test_torch_func(rank, world_size):
    """torch.func and vmap over the inner module do not trip over the wrapper's hooks."""
    torch.manual_seed(0)
    model = mlp()
    ddp = DDP(model)
    params = {name: p.detach() for name, p in model.named_parameters()}
    x = batch(rank).float()
    grads = torch.func.grad(lambda ps: torch.func.functional_call(model, ps, (x,)).square().mean())(params)
    ddp(x).square().mean().backward()
    mine = grads["0.weight"].clone()
    dist.all_reduce(mine)
    torch.testing.assert_close(model[0].weight.grad, mine / world_size)


@on_ranks()
def test_a_dropped_wrapper_is_collected_and_its_module_is_plain_again(rank, world_size):
    """A dropped wrapper lets go of its module: no reference cycle through hooks on live parameters."""
    import gc
    import weakref

    model = mlp()
    ddp = DDP(model)
    ddp(batch(rank).float()).sum().backward()
    wrapper = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert wrapper() is None
    model.zero_grad()
    model(batch(rank).float()).sum().backward()
    assert model[2].bias.grad.tolist() == [3.0, 3.0]


@on_ranks()
def test_torch_s_checkpoints_know_the_wrapper(rank, world_size):
    """They strip its prefix, which they do for what is an instance of torch's class."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    ddp = DDP(nn.Linear(2, 2))
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert sorted(get_model_state_dict(ddp)) == ["bias", "weight"]
