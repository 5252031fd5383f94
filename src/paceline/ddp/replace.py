"""Our class in the place of torch's, for programs that say ``torch.nn.parallel.DistributedDataParallel``."""

from __future__ import annotations

import sys

from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline_autoload
from paceline.ddp.module import DistributedDataParallel

_NOT_LOOKED_AT = ("torch", "paceline", "paceline_autoload")


def replace_torch_ddp() -> list[str]:
    """Put `paceline.DistributedDataParallel` in the place of torch's class in this process, for a notebook.

    From now on ``torch.nn.parallel.DistributedDataParallel`` is ours. Modules that have imported the name before, as
    frameworks do, get ours in its place. It returns the names that were replaced, so that you can see which they are.
    Instances and subclasses of torch's class that exist already stay what they are. Programs that you start with
    ``paceline run --swap``, or with ``PACELINE_SWAP=1``, need no call.

    Example::

        paceline.replace_torch_ddp()  # ['torch.nn.parallel.DistributedDataParallel', ..., '__main__.DDP']
    """
    replaced = paceline_autoload.swap()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _NOT_LOOKED_AT:
            continue
        # Not every entry of ``sys.modules`` is a module.
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is TorchDDP:
                setattr(module, attribute, DistributedDataParallel)
                replaced.append(f"{name}.{attribute}")
    return replaced
