"""``print(ddp.plan)``: the buckets with the names of their parameters, as wide as the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.gradients.plan import BucketPlan, BucketSpec

# A bucket of a large model has hundreds of parameters. plan.names(bucket.params) has them all.
_LINES_OF_NAMES = 4
_INDENT = " " * 8
_LEAST_WIDTH = 40
_FALLBACK = (100, 24)


def plan_lines(plan: BucketPlan, *, width: int | None = None) -> list[str]:
    """The table as lines of at most ``width`` characters. If no width is given, it is that of the terminal.

    A line is longer only if a single name does not fit into it, because half of a name is of no use.
    """
    width = max(_LEAST_WIDTH, width or shutil.get_terminal_size(_FALLBACK).columns)
    lines = [f"{'bucket':>6} {'size':>10} {'params':>7}  kind"]
    for bucket in plan.buckets:
        size = "?" if bucket.sparse else size_text(bucket.size_bytes)
        lines.append(f"{bucket.index:>6} {size:>10} {len(bucket.params):>7}  {_kind(bucket)}")
        lines += _wrapped(plan.names(bucket.params), width)
    planned = {index for bucket in plan.buckets for index in bucket.params}
    others = [index for index in range(len(plan.specs)) if index not in planned]
    lines.append(f"{len(plan.buckets)} bucket(s), {len(planned)} params, {size_text(plan.size_bytes)}")
    if others:
        lines += [f"{len(others)} in no bucket: frozen or not used", *_wrapped(plan.names(others), width)]
    return lines


def size_text(size_bytes: int) -> str:
    """A size for people, such as "12.3 MiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _kind(bucket: BucketSpec) -> str:
    words = [bucket.dtype, bucket.device, "sparse" if bucket.sparse else "", "delayed" if bucket.delayed else ""]
    return " ".join(filter(None, words))


def _wrapped(names: Sequence[str], width: int) -> list[str]:
    """The first few of ``names``, in lines, and how many more there are."""
    lines: list[str] = []
    for n, name in enumerate(names):
        word = name if n + 1 == len(names) else f"{name},"
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        elif len(lines) < _LINES_OF_NAMES:
            lines.append(_INDENT + word)
        else:
            return [*lines, f"{_INDENT}and {len(names) - n} more"]
    return lines
