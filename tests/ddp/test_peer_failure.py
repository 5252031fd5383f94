"""One rank raises or dies: the others say so without waiting for the time-out, and what can be done afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.errors import PeerError, PeerFailedError, StateError
from paceline.testing import InjectedFaultError, RankError, fail_at
from tests.on_ranks import on_ranks
from tests.reference import DDP, assert_in_sync, batch, ours_only

pytestmark = ours_only

# The group's time-out is longer than that of a run of the pool, so a rank that waited for it would fail the test.
GROUP_TIMEOUT_S = 600
# What ranks 0 and 1 raise first where rank 1 is the one that fails.
FIRST_ERROR = PeerFailedError, InjectedFaultError
FIRST_TEXT = r"(?i)rank 1\b.* This rank \(0\) was waiting in", "injected"


def _train_until_error(rank, world_size, fault, options):
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), fault.layer(), nn.Linear(4, 2)), **options)
    if fault.phase == "comm_hook":
        ddp.register_comm_hook(None, fault.hook(default_hooks.allreduce_hook))
    for step in range(fault.step + 2):
        try:
            ddp(batch(rank, step).float()).square().sum().backward()
        except RuntimeError as error:
            if rank != fault.rank:
                with pytest.raises(StateError):
                    ddp(batch(rank, step).float())
            return {
                "step": step,
                "type": type(error).__name__,
                "peer": isinstance(error, PeerError),
                "rank": getattr(error, "rank", None),
                "text": str(error),
            }
    return None


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("phase", ["forward", "backward", "comm_hook"])
@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_rank_raises_the_others_name_it(ranks, phase, failing, step):
    fault = fail_at(rank=failing, step=step, phase=phase)
    results = ranks(_train_until_error, fault, {}, world_size=2, group_timeout_s=GROUP_TIMEOUT_S)
    assert results[failing]["type"] == "InjectedFaultError"
    healthy = results[1 - failing]
    assert healthy["type"] == PeerFailedError.__name__
    assert healthy["rank"] == failing
    assert f"rank {failing}" in healthy["text"].lower()
    if phase != "backward":  # where no code of ours sees the exception go by
        assert "injected" in healthy["text"], "the error should carry the other rank's message"
    # A rank may be a step ahead at most: it cannot finish a step without the one that failed.
    assert healthy["step"] == step


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"find_unused_parameters": True}], ids=["static", "unused"]
)
def test_three_ranks_all_hear_of_the_one_that_raised(ranks, options):
    fault = fail_at(rank=2, step=1, phase="backward")
    results = ranks(_train_until_error, fault, options, world_size=3, group_timeout_s=GROUP_TIMEOUT_S)
    assert results[2]["type"] == "InjectedFaultError"
    for healthy in results[:2]:
        assert (healthy["type"], healthy["rank"], healthy["step"]) == ("PeerFailedError", 2, 1)


def test_a_rank_whose_process_ends_is_an_error_on_the_others(ranks):
    fault = fail_at(rank=1, step=1, phase="backward", action="exit")
    with pytest.raises(RankError) as caught:
        ranks(_train_until_error, fault, {}, settle_s=30, group_timeout_s=GROUP_TIMEOUT_S)
    assert list(caught.value.failures) == [1]
    healthy = caught.value.results[0]
    assert healthy["peer"], healthy
    # Who it was is not always known: a closed connection does not say whose it was.
    assert healthy["rank"] in (1, None)


def _use_after_error(rank, world_size):
    """Returns what a later step raises: on the rank that failed, and on the one that heard of it."""
    torch.manual_seed(0)
    fault = fail_at(rank=1, step=0, phase="backward")
    model = nn.Sequential(nn.Linear(4, 4), fault.layer(), nn.Linear(4, 2))
    ddp = DDP(model)
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(FIRST_ERROR[rank], match=FIRST_TEXT[rank]):
        ddp(batch(rank).float()).sum().backward()
    texts = []
    if rank == 0:
        for _ in range(2):
            with pytest.raises(StateError) as caught:
                ddp(batch(rank).float())
            texts.append(str(caught.value))
        store.set("rank 0 has given up", "1")
    else:
        # Before that, the failed rank may try again; after it, there is nobody to train with.
        store.wait(["rank 0 has given up"])
        with pytest.raises(StateError) as caught:
            ddp(batch(rank).float()).sum().backward()
        texts.append(str(caught.value))
    # The inner module still works by itself, as does saving what there is.
    model.state_dict()
    with torch.no_grad():
        model(batch(rank).float())
    return texts


def test_use_after_an_error(ranks):
    healthy, failed = ranks(_use_after_error, group_timeout_s=GROUP_TIMEOUT_S)
    for text in healthy:
        assert "rank 1" in text.lower(), "it says what had happened"
    assert len(failed) == 1
    assert "An earlier step raised on this rank (1) and the other ranks have given up because of it" in failed[0]


@on_ranks()
def test_a_rank_that_tries_again_at_once(rank, world_size):
    """A rank that catches its own error and repeats the step at once: nobody else notices."""
    torch.manual_seed(0)
    fault = fail_at(rank=1, step=1, phase="forward")
    model = nn.Sequential(nn.Linear(4, 4), fault.layer(), nn.Linear(4, 2))
    ddp = DDP(model)
    for i in range(3):
        x = batch(rank, i).float()
        try:
            out = ddp(x)
        except InjectedFaultError:
            out = ddp(x)
        out.square().sum().backward()
        assert_in_sync(model)
        ddp.zero_grad()


@on_ranks()
def test_the_process_is_usable_after_an_error(rank, world_size):
    """The process is not lost: with a new group, a new wrapper trains."""
    fault = fail_at(rank=1, step=0, phase="forward")
    ddp = DDP(nn.Sequential(nn.Linear(4, 2), fault.layer()))
    with pytest.raises(FIRST_ERROR[rank], match=FIRST_TEXT[rank]):
        ddp(batch(rank).float()).sum().backward()
    del ddp
    # A failed step may leave collectives of the old group behind, so all that follows is in a new one.
    group = dist.new_group([0, 1])
    model = nn.Linear(4, 2)
    ddp = DDP(model, process_group=group)
    ddp(batch(rank).float()).square().sum().backward()
    assert_in_sync(model, group=group)
