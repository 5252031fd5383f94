"""The frames that Dynamo compiles."""

from __future__ import annotations

from paceline import _torch


def test_a_frame_has_a_name_while_its_closure_is_not_assigned_yet():
    def outer():
        def inner():
            return late

        name = _torch.dynamo_frames._frame_name(inner.__code__, inner.__closure__)
        late = None
        return name

    assert outer().startswith("inner (test_dynamo_frames.py:")
