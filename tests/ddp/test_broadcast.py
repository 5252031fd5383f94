"""Tensors as one flat message."""

from __future__ import annotations

import torch

from paceline.ddp.broadcast import FlatMessage, flattened


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
    message = FlatMessage(_tensors())
    message.pack()
    assert torch.equal(message.bytes, flattened(_tensors()))


def test_what_is_packed_comes_out_again_and_keeps_no_memory() -> None:
    source, target = FlatMessage(_tensors()), FlatMessage([torch.zeros_like(tensor) for tensor in _tensors()])
    for turn in range(2):
        for message in (source, target):
            message.take_memory()
        source.tensors[0].fill_(turn)
        source.pack()
        target.bytes.copy_(source.bytes)
        target.unpack()
        for message in (source, target):
            message.release_memory()
            assert message.bytes.untyped_storage().nbytes() == 0
        for got, expected in zip(target.tensors, source.tensors, strict=True):
            assert torch.equal(got, expected)
