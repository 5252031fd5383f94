"""The namespace of the operators: another one whenever the code changes that says what they compile to.

Compiled graphs are kept on disk under a key that has the names of a graph's operators, and nothing of their fake rules
and lowerings. Under one name, code that an older Paceline compiled would run with this one.
"""

from __future__ import annotations

import hashlib
import pkgutil
from importlib import metadata

import torch

# What a cached graph has been made by. What an operator does when it runs is not in the cache.
FILES = ("tracing/ops.py", "tracing/hooks.py", "tracing/placements.py", "_torch/compilation.py")


def edition() -> str:
    try:
        parts = [pkgutil.get_data("paceline", name) or b"" for name in FILES]
    except OSError:  # installed without its source
        parts = [metadata.version("paceline").encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:6]


NAMESPACE = f"paceline_{edition()}"
operators = getattr(torch.ops, NAMESPACE)
