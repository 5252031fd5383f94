"""Import torch's suite with its skip decorators turned into no-ops."""

from __future__ import annotations

import importlib
import os
import unittest
from types import ModuleType
from typing import Any
from unittest import mock

from .selection import SUITE


def _keep(test: Any) -> Any:
    return test


def _keep_factory(*args: Any, **kwargs: Any) -> Any:
    return _keep


def import_suite(*, reload_midway: bool) -> ModuleType:
    """The suite's module, no test of which is skipped for want of a GPU, of NCCL, or for being known to fail.

    The module reads these variables while it is imported. Its end-to-end tests save and reload the wrapped
    model in the middle of training if the start method is a file; `env://` is the suite's default.
    """
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = "2"
    os.environ["INIT_METHOD"] = "file:///unused" if reload_midway else "env://"
    common_distributed = importlib.import_module("torch.testing._internal.common_distributed")
    common_utils = importlib.import_module("torch.testing._internal.common_utils")
    with (
        mock.patch.multiple(
            common_distributed,
            skip_if_no_gpu=_keep,
            skip_if_small_worldsize=_keep,
            skip_if_rocm_multiprocess=_keep,
            skip_if_lt_x_gpu=_keep_factory,
            nccl_skip_if_lt_x_gpu=_keep_factory,
            require_n_gpus_for_nccl_backend=_keep_factory,
            requires_nccl_version=_keep_factory,
        ),
        mock.patch.multiple(
            common_utils,
            skip_but_pass_in_sandcastle=_keep_factory,
            skip_but_pass_in_sandcastle_if=_keep_factory,
        ),
        mock.patch.multiple(unittest, skip=_keep_factory, skipIf=_keep_factory, skipUnless=_keep_factory),
    ):
        return importlib.import_module(SUITE)
