"""The namespace of our operators. It changes whenever the code that says what they compile to changes."""

from __future__ import annotations

import sys

import torch

from paceline import _torch
from paceline.code_version import code_version

NAMESPACE = f"paceline_{code_version(sys.modules[__package__], _torch)}"
operators = getattr(torch.ops, NAMESPACE)
