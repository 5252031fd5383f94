"""A name of torch's is looked up before it is replaced."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline import _torch, transport
from paceline._torch.renamed import found_in, name_in


class Kind:
    new = 1


def test_the_first_name_that_is_there_is_taken() -> None:
    assert name_in(Kind, "newer", "new") == "new"
    assert found_in(Kind, "newer", "new") == 1


def test_a_name_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Kind has no newer or old"):
        name_in(Kind, "newer", "old")


def test_a_backend_is_left_alone_by_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "_FR_SELF_RECORDING_BACKENDS", {"gloo"}, raising=False)
    _torch.leave_unrecorded("other")
    assert {"gloo", "other"} == c10d._FR_SELF_RECORDING_BACKENDS


def test_a_torch_without_a_recorder_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(c10d, "_FR_SELF_RECORDING_BACKENDS", raising=False)
    _torch.leave_unrecorded("other")
    assert not hasattr(c10d, "_FR_SELF_RECORDING_BACKENDS")


def test_shm_is_left_alone_also_if_import_torch_has_registered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transport.BACKEND in dist.Backend.backend_list
    monkeypatch.setattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set(), raising=False)
    transport.register()
    assert {transport.BACKEND} == c10d._FR_SELF_RECORDING_BACKENDS
