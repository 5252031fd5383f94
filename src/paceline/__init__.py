"""Paceline: data-parallel training for PyTorch in which the communication can be seen.

Each folder has one role, and imports run one way: a folder uses only those below it in this list.

- ``testing``: a pool of live ranks, and faults that follow a script
- ``integrations``: Lightning, Accelerate, transformers and Ray, which are imported only if a program uses them
- ``run``: starts ranks, joins their process group, and looks at them
- ``data``: which samples a rank gets, and numbers over all ranks
- ``ddp``: :class:`DistributedDataParallel` and its parts, and torch's names for them
- ``compiler``: compiled training, in which graphs report their gradients
- ``tracing``: distributed objects and collectives inside ``torch.compile``
- ``hooks``: comm hooks
- ``reduction``: how gradients become averages, from autograd's hook to ``.grad``
- ``gradients``: what there is to reduce: the plan, its buckets, and the memory they live in
- ``transport``: shared memory between the ranks of a host, as a backend of c10d
- ``control``: how ranks agree, hear of failures, and find out who is stuck
- ``errors``, ``settings``, ``threads``, ``code_version``, ``torch_version``: what every folder may use
- ``_torch``: every private torch name that is used

Importing the package changes five things in the process:

- a finder on ``sys.meta_path`` waits for torch's compiler to be imported;
- the backend "shm" is registered with ``torch.distributed.Backend``, unless ``import torch`` has done so
  (``paceline_autoload``);
- the operators of the namespace "paceline" are registered with ``torch.library``;
- our class counts as ``torch.nn.parallel.DistributedDataParallel`` for ``isinstance``;
- an ``atexit`` function ends the package's threads.
"""

# This comes first, because it says if torch does not fit.
from paceline import torch_version as _torch_version  # noqa: F401  # isort: skip
from paceline import data, errors, hooks, tracing, transport
from paceline.compiler import compile_module as compile
from paceline.compiler import explain
from paceline.data import mean, total
from paceline.ddp.load import load_state_dict
from paceline.ddp.module import DDP, DistributedDataParallel
from paceline.ddp.precision import MixedPrecision
from paceline.ddp.replace import replace_torch_ddp
from paceline.ddp.replica_check import assert_replicas_equal
from paceline.ddp.stats import Stats
from paceline.ddp.sync_batchnorm import SyncBatchNorm
from paceline.gradients.plan import BucketPlan
from paceline.run.init import init, shutdown
from paceline.run.spawn import spawn

transport.register()

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "BucketPlan",
    "DistributedDataParallel",
    "MixedPrecision",
    "Stats",
    "SyncBatchNorm",
    "assert_replicas_equal",
    "compile",
    "data",
    "errors",
    "explain",
    "hooks",
    "init",
    "load_state_dict",
    "mean",
    "replace_torch_ddp",
    "shutdown",
    "spawn",
    "total",
    "tracing",
    "transport",
]
