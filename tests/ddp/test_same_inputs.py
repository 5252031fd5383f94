"""A warning if all ranks train on the same inputs, and none in all other cases."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.ddp.same_inputs import FORWARDS

DATA = TensorDataset(torch.arange(3.0 * FORWARDS)[:, None])


def _warned(rank: int, world_size: int, case: str) -> list[tuple[str, str]]:
    """The warnings of a short training, with the files that they point at."""
    torch.manual_seed(rank if case == "own seeds" else 0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))
    ddp = paceline.DDP(model)
    loader: Any = DataLoader(DATA, batch_size=1, shuffle=case in ("own seeds", "shuffled"))
    if case == "our loader":
        loader = paceline.data.Loader(DATA, batch_size=1, shuffle=True)
    if case == "evaluation":
        ddp.eval()
    batches = [batch for (batch,) in loader][: 2 if case == "few" else None]
    if case == "constant":
        batches = [batches[0]] * len(batches)
    if case == "one rank differs" and rank == 2:
        batches[FORWARDS // 2] = torch.tensor([[-1.0]])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in batches:
            ddp(batch).sum().backward()
    return [(str(warning.message), warning.filename) for warning in told]


@pytest.mark.parametrize("case", ["plain", "shuffled"])
def test_the_same_inputs_on_all_ranks_are_told_once(ranks: Any, case: str) -> None:
    told = [warning for rank in ranks(_warned, case, world_size=3) for warning in rank]
    assert len(told) == 1
    text, file = told[0]
    assert text.startswith("All 3 ranks were given the same inputs in each of the first 10 training forwards")
    assert "paceline.data.Loader" in text
    assert file == __file__


@pytest.mark.parametrize("case", ["own seeds", "our loader", "evaluation", "few", "constant", "one rank differs"])
def test_no_false_alarm(ranks: Any, case: str) -> None:
    assert ranks(_warned, case, world_size=3) == [[]] * 3


def _asked(rank: int, world_size: int) -> int:
    ddp = paceline.DDP(torch.nn.Linear(1, 1))
    asked = []
    ask = ddp.channel.store_thread.run

    def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        # A wait that takes long asks the store as well, for other things.
        asked.extend(key for key in args if isinstance(key, str) and len(key) == 64)
        return ask(call, *args, **kwargs)

    ddp.channel.store_thread.run = run  # type: ignore[method-assign]
    for step in range(3 * FORWARDS):
        ddp(
            torch.tensor(
                [
                    [
                        float(step),
                    ]
                ]
            )
            + rank
        ).sum().backward()
    return len(asked)


def test_it_asks_the_store_once(ranks: Any) -> None:
    assert ranks(_asked) == [1, 1]


def _odd_inputs(rank: int, world_size: int) -> None:
    class Takes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.weight.sum()

    tensors = torch.eye(2).to_sparse(), torch.zeros(0), torch.zeros(2, device="meta")
    for inputs in ((), ("a text",), ({"x": [object()]},), *((tensor,) for tensor in tensors)):
        ddp = paceline.DDP(Takes())
        for _ in range(FORWARDS + 1):
            ddp(*inputs).backward()


def test_inputs_that_cannot_be_compared(ranks: Any) -> None:
    ranks(_odd_inputs)
