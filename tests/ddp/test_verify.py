"""Proof of synchronisation: replicas that came apart are found, named, and said what parted first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import DDP
from paceline.errors import BadArgumentError, BadTypeError, ReplicaMismatchError
from tests.on_ranks import on_ranks

Ranks = Callable[..., list[Any]]


# -- every N steps -------------------------------------------------------------------------------------


def _train(rank: int, size: int, what: str, steps: int, every: int) -> dict[str, Any]:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), verify_every=every)
    lr = 0.1 if (what, rank) != ("lr", 1) else 0.2
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=lr)
    if what == "hook":
        ddp.register_comm_hook(None, _own_gradients)
    told = ""
    n = 0
    try:
        for n in range(1, steps + 1):
            ddp(torch.randn(3, 4) + rank).square().sum().backward()
            if rank == 1 and n == 3:
                if what == "clip":
                    ddp.module[0].weight.grad.mul_(0.5)
                if what == "parameter":
                    with torch.no_grad():
                        ddp.module[2].bias[1] += 1e-6
                if what == "state":
                    optimizer.state[ddp.module[0].bias]["exp_avg"][0] += 1
            optimizer.step()
            optimizer.zero_grad()
    except ReplicaMismatchError as error:
        told = str(error)
        # All ranks raise it together: the wrapper goes on.
        ddp.zero_grad()
    dist.barrier()
    return {"told": told, "step": n}


def _own_gradients(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _closures(rank: int, size: int) -> None:
    """Accumulate in ``no_sync``, and let the optimizer run the backward that synchronises."""
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(4, 2), verify_every=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def backward() -> torch.Tensor:
        loss = ddp(torch.randn(3, 4) + rank).square().sum()
        loss.backward()
        return loss

    for n in range(4):
        with ddp.no_sync():
            backward()
        optimizer.step(backward) if n % 2 else optimizer.step(closure=backward)
        optimizer.zero_grad()
    if rank == 1:
        with torch.no_grad():
            ddp.module.bias[0] += 1
    with pytest.raises(ReplicaMismatchError, match="parameter 'bias' differs"):
        backward()


def test_a_closure_that_runs_backward_is_no_difference(ranks: Ranks) -> None:
    ranks(_closures)


def _several_optimizers(rank: int, size: int) -> None:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(4, 2), verify_every=1)
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1 / n, momentum=0.5) for n in range(1, 9)]
    for _ in range(2):
        ddp(torch.randn(3, 4) + rank).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        ddp.zero_grad()


def test_several_optimizers_of_one_parameter_are_no_difference(ranks: Ranks) -> None:
    ranks(_several_optimizers)


def test_ranks_that_are_alike_stay_so_in_silence(ranks: Ranks) -> None:
    assert ranks(_train, "nothing", 6, 1) == [{"told": "", "step": 6}] * 2


@pytest.mark.parametrize(
    ("what", "step", "words"),
    [
        ("parameter", 4, ["parameter '2.bias' differs between rank 0; rank 1", "The optimizer parted first"]),
        ("state", 4, ["optimizer", "The optimizer parted first"]),
        ("lr", 2, ["parameter '0.weight' differs", "The optimizer parted first", "equal gradients"]),
        ("clip", 4, ["Gradients parted first", "gradient given to the optimizer of '0.weight'"]),
        ("hook", 2, ["Gradients parted first", "gradient"]),
    ],
)
def test_what_parted_first_is_named_on_all_ranks(ranks: Ranks, what: str, step: int, words: list[str]) -> None:
    told = ranks(_train, what, 8, 2)
    assert told[0] == told[1]
    assert told[0]["step"] == step
    for word in words:
        assert word in told[0]["told"]
    since = "after step 2" if step == 4 else "when the module was wrapped"
    assert f"differ in step {step}; they were last equal {since}" in told[0]["told"]


def _once(rank: int, size: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = DDP(model)
    paceline.assert_replicas_equal(ddp)
    paceline.assert_replicas_equal(model)
    told = []
    with torch.no_grad():
        if rank == 2:
            model[1].running_mean[0] = 7
        with pytest.raises(ReplicaMismatchError) as caught:
            paceline.assert_replicas_equal(ddp)
        told.append(str(caught.value))
        if rank == 1:
            model[0].weight[0, 0] += 1
        with pytest.raises(ReplicaMismatchError) as caught:
            paceline.assert_replicas_equal(model)
        told.append(str(caught.value))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank), momentum=0.9)
    model[0].weight.data.zero_()
    model[1].running_mean.zero_()
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad(set_to_none=False)
    optimizer.step()
    for buffer in model.buffers():
        buffer.zero_()
    with pytest.raises(ReplicaMismatchError) as caught:
        paceline.assert_replicas_equal(ddp, optimizer=optimizer)
    return [*told, str(caught.value)]


def test_asking_once(ranks: Ranks) -> None:
    told = ranks(_once, world_size=3, allow_warnings=((".*", UserWarning),))
    assert told[0] == told[1] == told[2]
    assert "buffer '1.running_mean' differs between rank 0, 1; rank 2" in told[0][0]
    assert "parameter '0.weight' differs between rank 0, 2; rank 1" in told[0][1]
    assert "optimizer state of '0.weight' differs" in told[0][2]


@on_ranks()
def test_a_rank_without_inputs_has_no_say(rank: int, size: int) -> None:
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(4, 2), verify_every=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for _ in range(2 + 2 * rank):
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    paceline.assert_replicas_equal(ddp)
    assert ddp.stats()["steps"] == 4


def test_what_is_no_number_of_steps_is_refused() -> None:
    world = paceline.init()
    assert world.world_size == 1
    try:
        with pytest.raises(BadTypeError, match="verify_every"):
            DDP(nn.Linear(2, 2), verify_every="10")
        with pytest.raises(BadArgumentError, match="verify_every"):
            DDP(nn.Linear(2, 2), verify_every=-1)
        DDP(nn.Linear(2, 2), verify_every=1)(torch.ones(1, 2)).sum().backward()
    finally:
        paceline.shutdown()
