"""Every way in which a gradient reaches a parameter, or one rank's backward meets another's: right, or refused by name.

docs/guarantees.md has the table. Each row that is tested here runs over gloo and over shared memory.
"""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import DisagreementError, ReplicaMismatchError
from tests.ddp.exact import Sum, assert_grad, inputs_of, line
from tests.reference import DDP, ours_only
from tests.transport.requirements import needs_shm

pytestmark = [ours_only, pytest.mark.parametrize("backend", ["gloo", "cpu:shm"])]

Ranks = Callable[..., list[Any]]


@pytest.fixture
def run(ranks: Ranks, backend: str) -> Ranks:
    """Run a function on two ranks of ``backend``."""
    if backend == "cpu:shm":
        needs_shm()
    return lambda *args, **options: ranks(*args, backend=backend, **options)


# -- frozen for a while --------------------------------------------------------------------------------


def _in_turns(rank: int, size: int, through: str, compiled: bool) -> None:
    """Train one half with the other frozen, and the other way round."""
    module = Sum()
    ddp = DDP(module)
    call = {"module": module, "wrapper": ddp}[through]
    call = torch.compile(call, backend="aot_eager") if compiled else call
    for turn in range(6):
        trained, frozen = (module.a, module.b) if turn % 2 else (module.b, module.a)
        trained.requires_grad_(True)
        frozen.requires_grad_(False)
        module.c.requires_grad_(False)
        ddp.zero_grad()
        call(inputs_of(rank)).sum().backward()
        assert_grad(trained, 1.5)
        assert all(p.grad is None for part in (frozen, module.c) for p in part.parameters())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("through", ["module", "wrapper"])
def test_two_parts_that_are_trained_in_turns(run: Ranks, through: str, compiled: bool) -> None:
    run(_in_turns, through, compiled)


def _frozen_from_the_start(rank: int, size: int) -> None:
    module = Sum(frozen="a")
    ddp = DDP(module)
    module.requires_grad_(False)
    module.a.requires_grad_(True)
    module(inputs_of(rank)).sum().backward()
    assert_grad(module.a, 1.5)
    assert ddp.stats()["steps"] == 1


def test_a_parameter_that_was_frozen_when_the_module_was_wrapped(run: Ranks) -> None:
    run(_frozen_from_the_start)


def _unfrozen_in_no_sync(rank: int, size: int) -> None:
    module = Sum()
    ddp = DDP(module)
    module.a.requires_grad_(False)
    module(inputs_of(rank)).sum().backward()
    module.requires_grad_(False)
    module.a.requires_grad_(True)
    ddp.zero_grad()
    with ddp.no_sync():
        module(inputs_of(rank)).sum().backward()
    assert_grad(module.a, rank + 1.0)
    module(inputs_of(rank)).sum().backward()
    assert_grad(module.a, 3.0)


def test_a_parameter_that_is_unfrozen_for_a_backward_that_does_not_synchronise(run: Ranks) -> None:
    run(_unfrozen_in_no_sync)


def _frozen_as_a_whole(rank: int, size: int, alone: bool) -> None:
    """A generator learns through a discriminator that is frozen meanwhile."""
    generator, discriminator = DDP(nn.Linear(3, 3, bias=False)), DDP(line())
    for _ in range(3):
        discriminator.requires_grad_(False)
        generator.zero_grad()
        discriminator(generator(inputs_of(rank))).sum().backward()
        weight = discriminator.module.weight.detach()
        assert torch.equal(generator.module.weight.grad, 1.5 * weight.T.expand(3, 3))
        if alone and rank == 0:
            # The rank makes an adversarial example, which is its own affair.
            x = inputs_of(rank).requires_grad_(True)
            discriminator(x).sum().backward()
            assert torch.equal(x.grad, weight)
        discriminator.requires_grad_(True)
        discriminator.zero_grad()
        discriminator(generator(inputs_of(rank)).detach()).sum().backward()
        assert discriminator.module.weight.grad is not None
        assert discriminator.stats()["steps"] == generator.stats()["steps"]


@pytest.mark.parametrize("alone", [False, True])
def test_a_wrapped_module_that_is_frozen_as_a_whole(run: Ranks, alone: bool) -> None:
    run(_frozen_as_a_whole, alone)


def _frozen_and_replaced(rank: int, size: int) -> None:
    """The shared layer of a module that is frozen as a whole has other parameters by now."""
    maker, critic = line(), Sum()
    first, second = DDP(maker), DDP(critic)
    critic.load_state_dict(critic.state_dict(), assign=True)
    critic.requires_grad_(False)
    second(first(inputs_of(rank)).expand(1, 3)).sum().backward()
    assert maker.weight.grad is not None
    assert second.stats()["steps"] == 0
    assert first.stats()["steps"] == 1


def test_a_module_that_is_frozen_as_a_whole_and_has_new_parameters(run: Ranks) -> None:
    run(_frozen_and_replaced)


# -- parameters that come later ------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Sum], nn.Module]] = {
    "a new parameter": lambda module: setattr(module.a, "weight", nn.Parameter(torch.ones(1, 3))) or module.a,
    "a new module": lambda module: setattr(module, "a", line()) or module.a,
    "a loaded one": lambda module: module.a.load_state_dict(line().state_dict(), assign=True) and module.a,
}


def _newcomer(rank: int, size: int, change: str) -> None:
    module = Sum()
    ddp = DDP(module)
    module.requires_grad_(False)
    new = CHANGES[change](module)
    new.requires_grad_(True)
    # Nobody but the newcomer has a gradient, and no wrapper sees the forward.
    module(inputs_of(rank)).sum().backward()
    assert_grad(new, 1.5)
    assert ddp.stats()["steps"] == 1


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_came_after_wrapping_is_trained_through_the_module(run: Ranks, change: str) -> None:
    run(_newcomer, change)


def _different_newcomers(rank: int, size: int, through: str) -> str:
    module = Sum()
    ddp = DDP(module)
    module.c.weight = nn.Parameter(torch.full((1, 3), float(rank)))
    with pytest.raises(ReplicaMismatchError) as caught:
        (ddp if through == "wrapper" else module)(inputs_of(rank)).sum().backward()
    module.c.weight = nn.Parameter(torch.ones(1, 3))
    ddp.zero_grad()
    ddp(inputs_of(rank)).sum().backward()
    assert_grad(module.c, 1.5)
    return str(caught.value)


@pytest.mark.parametrize("through", ["module", "wrapper"])
def test_parameters_that_came_after_wrapping_with_other_values_are_refused(run: Ranks, through: str) -> None:
    for told in run(_different_newcomers, through):
        assert "parameter 'c.weight' differs between rank 0; rank 1" in told


def _shared_newcomer(rank: int, size: int) -> None:
    """A layer that two wrappers share gets new parameters, which both reduce in their turns, by their own rules."""
    layer = line()
    first, second = DDP(nn.Sequential(layer)), DDP(nn.Sequential(layer))
    layer.load_state_dict(line().state_dict(), assign=True)
    second(inputs_of(rank)).sum().backward()
    assert_grad(layer, 1.5)
    layer.zero_grad()
    with first.weighted(1.0 + 2 * rank):
        first(inputs_of(rank)).sum().backward()
    assert_grad(layer, 1.75)
    layer.zero_grad()
    with second.no_sync():
        second(inputs_of(rank)).sum().backward()
    assert_grad(layer, rank + 1.0)
    assert (first.stats()["steps"], second.stats()["steps"]) == (1, 1)


def test_a_newcomer_that_two_wrappers_share(run: Ranks) -> None:
    run(_shared_newcomer)


def _shared_and_frozen(rank: int, size: int) -> None:
    """A layer that was frozen when two wrappers were made of it is trained by both in turns, by their own rules."""
    layer = line().requires_grad_(False)
    first, second = (DDP(nn.Sequential(nn.Linear(3, 3), layer)) for _ in range(2))
    layer.requires_grad_(True)
    weights = [1.0, 3.0]
    for ddp in (first, second, first):
        ddp.zero_grad()
        nn.init.eye_(ddp.module[0].weight)
        nn.init.zeros_(ddp.module[0].bias)
        with ddp.weighted(weights[rank]):
            ddp(inputs_of(rank)).sum().backward()
        assert_grad(layer, 1.75)
        if rank == 1:
            # This rank alone has one micro-batch more.
            with ddp.no_sync():
                ddp(inputs_of(rank)).sum().backward()
        ddp.zero_grad()
    assert (first.stats()["steps"], second.stats()["steps"]) == (2, 1)


def test_a_shared_layer_that_was_frozen_when_it_was_wrapped(run: Ranks) -> None:
    run(_shared_and_frozen)


def _swapped(rank: int, size: int) -> int:
    """Put other parameters into the module for a while, again and again; return how many of them are left."""
    ddp = DDP(line())
    own, others = ddp.module.weight, []
    for _ in range(5):
        ddp.module.weight = nn.Parameter(torch.zeros(1, 3))
        others.append(weakref.ref(ddp.module.weight))
        ddp.module.weight = own
        ddp(inputs_of(rank)).sum().backward()
    gc.collect()
    return sum(ref() is not None for ref in others)


def test_parameters_that_were_there_for_a_while_are_not_kept(run: Ranks) -> None:
    assert run(_swapped) == [0, 0]


# -- hooks of users ------------------------------------------------------------------------------------


def _optimizer_in_backward(rank: int, size: int, registered: str, compiled: bool) -> list[list[float]]:
    """Step an optimizer in a post-accumulate-grad hook: replicas stay together, and weights move by the average."""
    module = Sum()
    optimizers = {param: torch.optim.SGD([param], lr=1.0) for param in module.parameters()}
    seen: list[list[float]] = []

    def hook(param: torch.Tensor) -> None:
        seen.append(param.grad.tolist()[0])
        optimizers[param].step()
        optimizers[param].zero_grad()

    if registered == "after":
        ddp = DDP(module)
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(hook)
    if registered == "before":
        ddp = DDP(module)
    before = [param.detach().clone() for param in module.parameters()]
    call = torch.compile(ddp, backend="aot_eager") if compiled else ddp
    for way in (call, module, call):
        # b is used on rank 0 only: its average is what rank 0 has by half, and both ranks move by it.
        way(inputs_of(rank), rank == 0).sum().backward()
    moved = [(old - param).tolist()[0] for old, param in zip(before, module.parameters(), strict=True)]
    torch.testing.assert_close(moved, [[4.5] * 3, [1.5] * 3, [4.5] * 3])
    assert len(seen) == 9
    return [param.tolist() for param in module.parameters()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("registered", ["before", "after"])
def test_a_hook_that_steps_an_optimizer_gets_the_average(run: Ranks, registered: str, compiled: bool) -> None:
    first, second = run(_optimizer_in_backward, registered, compiled)
    assert first == second


def _hook_that_raises(rank: int, size: int) -> None:
    first, second = DDP(nn.Linear(3, 3, bias=False)), DDP(line())

    def hook(param: torch.Tensor) -> None:
        raise ValueError("the hook")

    handle = second.module.weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(ValueError, match="the hook") if rank == 0 else contextlib.nullcontext():
        if rank != 0:
            handle.remove()
        second(first(inputs_of(rank))).sum().backward()
    # Both wrappers have done their part of that backward, and go on.
    handle.remove()
    for ddp in (first, second):
        ddp.zero_grad()
    second(first(inputs_of(rank))).sum().backward()
    assert first.module.weight.grad is not None
    assert (first.stats()["steps"], second.stats()["steps"]) == (2, 2)


def test_a_hook_that_raises_on_one_rank_keeps_no_wrapper_from_its_part(run: Ranks) -> None:
    run(_hook_that_raises)


# -- backwards that meet -------------------------------------------------------------------------------


def _run_all(modules: list[Any], inputs: torch.Tensor) -> None:
    for module in modules:
        module(inputs).sum().backward()


def _met(rank: int, size: int, what: str, compiled: bool) -> str:
    first, second = DDP(line()), DDP(line())
    call = torch.compile(first, backend="aot_eager") if compiled else first
    backwards = [call, second]
    if what == "module" and rank == 0:
        backwards.insert(0, first.module)
    if what == "order" and rank == 1:
        backwards.reverse()
    with pytest.raises(DisagreementError) as caught:
        _run_all(backwards, inputs_of(rank))
    # Nothing is under way, and training goes on.
    for ddp in (first, second):
        ddp.zero_grad()
        ddp(inputs_of(rank)).sum().backward()
        assert_grad(ddp.module, 1.5)
    return str(caught.value)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "module",
            [
                "backward 1 of wrapper 1, without the wrapper's forward (through ddp.module, for example)",
                "wrapper 1, through the wrapper",
            ],
        ),
        ("order", ["backward 1 of wrapper 1, through the wrapper", "backward 1 of wrapper 2, through the wrapper"]),
    ],
)
def test_different_backwards_that_meet_are_refused(run: Ranks, what: str, said: list[str], compiled: bool) -> None:
    for told in run(_met, what, compiled):
        for rank, words in enumerate(said):
            assert re.search(rf"rank {rank}: .*{re.escape(words)}, at .*test_ways_in\.py:\d+", told)


def _forward_without_backward(rank: int, size: int, why: str) -> str:
    """A forward that trained nothing does not excuse a backward that one rank runs by itself."""
    ddp = DDP(line())
    ddp(inputs_of(rank)).sum().backward()
    ddp.zero_grad()
    ddp.train(why != "eval mode")
    ddp.requires_grad_(why != "frozen")
    ddp(inputs_of(rank))
    ddp.train()
    ddp.requires_grad_(True)
    with pytest.raises(DisagreementError) as caught:
        _run_all([ddp.module, ddp] if rank == 0 else [ddp], inputs_of(rank))
    return str(caught.value)


@pytest.mark.parametrize("why", ["eval mode", "frozen"])
def test_a_forward_that_trains_nothing_is_no_excuse(run: Ranks, why: str) -> None:
    for told in run(_forward_without_backward, why):
        assert "rank 0: backward 2 of wrapper 1, without the wrapper's forward" in told


def _no_valid_sample(rank: int, size: int) -> None:
    """A rank whose batch has nothing to learn from keeps in step with a sum of zeros over its parameters."""
    ddp = DDP(line())
    for turn in range(4):
        ddp.zero_grad()
        output = ddp(inputs_of(rank))
        loss = output.sum() if rank == 0 or turn % 2 else sum(0.0 * param.sum() for param in ddp.parameters())
        loss.backward()
        assert_grad(ddp.module, 1.5 if turn % 2 else 0.5)


def test_a_rank_without_a_valid_sample_is_in_step(run: Ranks) -> None:
    run(_no_valid_sample)
