"""Comm hooks: functions that do something with a bucket of gradients instead of plain averaging.

- ``contract``: what a hook is given and must return; which hooks may overlap.
- ``allreduce``: plain averaging as a hook.
- ``compress``: float16 and bfloat16, as hooks and as wrappers ``fp16(hook)``, ``bf16(hook)`` of others.
- ``powersgd``: low-rank compression with error feedback.
- ``replacements``: what runs in the place of torch's hooks that cannot run on every backend.
- ``torch_hooks``: which hooks are torch's own.

::

    ddp.register_comm_hook(None, paceline.hooks.bf16_compress)
"""

from __future__ import annotations

from paceline.hooks.allreduce import allreduce
from paceline.hooks.compress import bf16, bf16_compress, fp16, fp16_compress
from paceline.hooks.contract import Hook, HookBucket, check_hook, check_state, overlapping, overlaps, takes_group
from paceline.hooks.powersgd import PowerSGDState, powersgd
from paceline.hooks.replacements import resolve

__all__ = [
    "Hook",
    "HookBucket",
    "PowerSGDState",
    "allreduce",
    "bf16",
    "bf16_compress",
    "check_hook",
    "check_state",
    "fp16",
    "fp16_compress",
    "overlapping",
    "overlaps",
    "powersgd",
    "resolve",
    "takes_group",
]
