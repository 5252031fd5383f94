"""The namespace of the operators: another one whenever the code changes that says what they compile to."""

from __future__ import annotations

import torch

from paceline.edition import edition

# What a cached graph has been made by. What an operator does when it runs is not in the cache.
NAMESPACE = "paceline_" + edition(
    "tracing/ops.py", "tracing/hooks.py", "tracing/placements.py", "_torch/compilation.py"
)
operators = getattr(torch.ops, NAMESPACE)
