"""A name of torch's is looked up before it is replaced."""

from __future__ import annotations

import pytest
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
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


def test_torch_s_recorder_leaves_shm_alone() -> None:
    assert "shm" in getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", {"shm"})
