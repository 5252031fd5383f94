"""Digests: tensors of different bytes, or of the same ones at other places, have different ones."""

from __future__ import annotations

import pytest
import torch

from paceline.control.digest import combine, digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("numel", [0, 1, 7, 1024, 4099, 20_000])
def test_a_digest_is_of_all_bytes_and_where_they_stand(dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(0)
    whole = (torch.randn(numel + 1) * 100).to(dtype)
    # The tensor is compared at an odd offset of its storage, and as one with memory of its own.
    tensor = whole[1:]
    assert digest(tensor) == digest(tensor.clone())
    for at in {0, numel // 2, numel - 1} if numel else ():
        changed = tensor.clone()
        changed[at] = 1 if changed[at] == 0 else 0
        assert digest(changed) != digest(tensor), at
    if numel > 2 and dtype.is_floating_point:
        assert digest(tensor.flip(0)) != digest(tensor)
    assert digest(torch.zeros(numel, dtype=dtype)) != digest(torch.zeros(numel + 1, dtype=dtype))


def test_rows_and_columns_that_changed_places_are_noticed() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(8, 4096)
    for moved in (tensor[torch.randperm(8)], tensor[:, torch.randperm(4096)], tensor.t()):
        assert digest(moved) != digest(tensor)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    pair = [digest(tensor[0]), digest(tensor[1])]
    assert combine(pair) != combine(pair[::-1])
