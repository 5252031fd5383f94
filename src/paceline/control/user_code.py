"""The line of the user's code in a traceback or in a thread's stack, without the libraries around it."""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Iterable
from functools import cache
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType

import torch

_PATHS = sysconfig.get_paths()
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_COLLECTIVES = f"{_TORCH}distributed{os.sep}distributed_c10d.py"
_INSTALLED = tuple(_PATHS[name] + os.sep for name in ("purelib", "platlib"))
_LIBRARY = tuple(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib"))


@cache
def is_user_code(file: str) -> bool:
    """Whether ``file`` belongs to the user's program, and not to a library or to no file (``<frozen ...>``)."""
    return is_not_ours(file) and not file.startswith(_INSTALLED)


@cache
def is_not_ours(file: str) -> bool:
    """Whether ``file`` is the user's or an installed library's, and not Python's, torch's or Paceline's."""
    if file.startswith((_OURS, _TORCH, "<")):
        return False
    # Packages are installed below the standard library.
    return not file.startswith(_LIBRARY) or file.startswith(_INSTALLED)


def line_of_traceback(traceback: TracebackType | None) -> str:
    """Where an exception was raised, as ``train.py:88 in load``; empty without a traceback."""
    return _pick(reversed(list(walk_tb(traceback))))


def line_of_frame(frame: FrameType | None) -> str:
    """Where a thread is, as ``train.py:88 in load``."""
    # Without a frame, ``walk_stack`` would begin with the caller's.
    return "" if frame is None else _pick(walk_stack(frame))


def line_of_caller() -> str:
    """The line of the user's code that has led to this call."""
    return line_of_frame(inspect.currentframe())


def user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` without the frames of libraries; unchanged if there are no other frames."""
    kept: TracebackType | None = None
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    for entry in reversed(frames):
        if is_user_code(entry.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept or (frames[0] if frames else None)


def has_user_frames(traceback: TracebackType | None) -> bool:
    return any(is_user_code(frame.f_code.co_filename) for frame, _ in walk_tb(traceback))


def has_user_frames_below(frame: FrameType | None) -> bool:
    """Whether a thread that runs ``frame`` was called from the user's code, or is in it."""
    return frame is not None and any(is_user_code(entry.f_code.co_filename) for entry, _ in walk_stack(frame))


OWN_COLLECTIVE = "a collective that it called itself"
# What a thread is doing, by the innermost of these paths that is on its stack.
_ACTIVITIES = (
    (f"{_TORCH}utils{os.sep}data", "data loading"),
    (f"{_TORCH}optim", "the optimizer"),
    (f"{_TORCH}_dynamo", "compiling"),
    (f"{_TORCH}_inductor", "compiling"),
    (f"{_TORCH}serialization.py", "saving or loading"),
    (f"{_TORCH}distributed{os.sep}checkpoint", "saving or loading"),
    (_COLLECTIVES, OWN_COLLECTIVE),
    (f"{_TORCH}autograd", "backward"),
    (f"{_TORCH}nn{os.sep}modules", "forward"),
)


def activity_of_frame(frame: FrameType | None) -> str:
    """What a thread is doing, as far as the files on its stack tell: ``data loading``, ``the optimizer``, ..."""
    while frame is not None:
        for start, activity in _ACTIVITIES:
            if frame.f_code.co_filename.startswith(start):
                return activity
        frame = frame.f_back
    return "code of its own"


def collective_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame in which a collective of torch's own runs, if one does."""
    while frame is not None and not frame.f_code.co_filename.startswith(_COLLECTIVES):
        frame = frame.f_back
    return frame


def _pick(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost place in the user's code; if there is none, in an installed library; if none, the innermost."""
    found = [(frame.f_code, line or 0) for frame, line in frames]
    for wanted in (is_user_code, is_not_ours, lambda file: True):
        for code, line in found:
            if wanted(code.co_filename):
                return f"{_short(code.co_filename)}:{line} in {code.co_name}"
    return ""


def _short(file: str) -> str:
    here = os.getcwd() + os.sep
    return file[len(here) :] if file.startswith(here) else file
