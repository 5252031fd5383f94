"""Tensors as one flat message."""

from __future__ import annotations

import torch

from paceline.buffers import Packing, _packed_once


def _tensors() -> list[torch.Tensor]:
    return [
        torch.tensor(7, dtype=torch.int64),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([True, False, True]),
        torch.empty(0),
        torch.arange(3, dtype=torch.float64),
        torch.arange(4.0),
    ]


def test_a_message_is_the_same_whichever_way_it_is_made() -> None:
    """One rank packs at once what another takes out of its places."""
    packing = Packing(_tensors())
    packing.pack()
    assert torch.equal(packing.message, _packed_once(_tensors()))


def test_what_is_packed_comes_out_again_and_keeps_no_memory() -> None:
    source, target = Packing(_tensors()), Packing([torch.zeros_like(tensor) for tensor in _tensors()])
    for turn in range(2):
        for packing in (source, target):
            packing.take_memory()
        source.tensors[0].fill_(turn)
        source.pack()
        target.message.copy_(source.message)
        target.unpack()
        for packing in (source, target):
            packing.release_memory()
            assert packing.message.untyped_storage().nbytes() == 0
        for got, expected in zip(target.tensors, source.tensors, strict=True):
            assert torch.equal(got, expected)
