"""The line of the user's code: of a traceback, or of what a thread is doing, without the libraries around it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from functools import cache
from types import FrameType, TracebackType

import torch

_PATHS = sysconfig.get_paths()
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_INSTALLED = tuple(_PATHS[name] + os.sep for name in ("purelib", "platlib"))
_LIBRARY = tuple(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib"))


@cache
def is_user_code(file: str) -> bool:
    """Whether ``file`` is a program's own, and not of a library or of no file at all (``<frozen ...>``)."""
    return is_not_ours(file) and not file.startswith(_INSTALLED)


@cache
def is_not_ours(file: str) -> bool:
    """Whether ``file`` is neither Python's, torch's nor Paceline's: the user's, or a library's that was installed."""
    if file.startswith((_OURS, _TORCH, "<")):
        return False
    # Packages are installed below the standard library.
    return not file.startswith(_LIBRARY) or file.startswith(_INSTALLED)


def line_of_traceback(traceback: TracebackType | None) -> str:
    """Where an exception was raised, as ``train.py:88 in load``; empty without a traceback."""
    places = []
    while traceback is not None:
        places.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno, traceback.tb_frame.f_code.co_name))
        traceback = traceback.tb_next
    return _pick(reversed(places))


def line_of_frame(frame: FrameType | None) -> str:
    """Where a thread is, as ``train.py:88 in load``."""
    places = []
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return _pick(places)


def _pick(places: Iterable[tuple[str, int, str]]) -> str:
    """The innermost place of the user's; failing that, of an installed library; failing that, of anything."""
    found = list(places)
    for wanted in (is_user_code, is_not_ours, lambda file: True):
        for file, line, name in found:
            if wanted(file):
                return f"{_short(file)}:{line} in {name}"
    return ""


def _short(file: str) -> str:
    here = os.getcwd() + os.sep
    return file[len(here) :] if file.startswith(here) else file
