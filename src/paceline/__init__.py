"""Paceline: data-parallel training for PyTorch in which the communication can be seen.

The layout, in the order in which data flows:

- ``plan``: parameters -> :class:`BucketPlan`, pure values
- ``roster``: which parameters of a module take part, and whether that has changed; ``portion``: this rank's part of one
  that is a DTensor
- ``bucket``: flat storage that gradients live in; what a comm hook receives
- ``exchange``: how a bucket crosses the ranks; ``status``: what ranks say with the last one
- ``planner``: the plan in force, with ``slots`` (the parameters it is for), ``layout`` (its buckets) and ``ledger``
  (what is known of their gradients); ``ownership``: which of several wrappers reduces a parameter
- ``backward``: what becomes of the gradients of one, with ``early`` (those of a compiled one), ``courier`` (sends
  buckets), ``settlement`` (gives gradients out), ``weighing`` and ``higher_order`` (``create_graph=True``)
- ``reducer``: the phases of a step, with ``inbox`` (gradients that are ready), ``watch`` (the end of backward),
  ``step`` and ``telemetry`` (when things happened)
- ``module``: :class:`DistributedDataParallel`, which connects them; ``arguments`` (with ``options``), ``lookout`` (with
  ``outputs``), ``buffers``, ``join``, ``precision``: its parts; ``compat``, ``torch_reducer``, ``logging_data``,
  ``messages``: torch's names for them
- ``hooks``: comm hooks; ``sync_batchnorm``
- ``compiler``: compiled training, in which graphs report their gradients
- ``tracing``: distributed objects and collectives inside ``torch.compile``; ``edition``: whose compiled code it is
- ``control``: agreement, news of failure and the hang watch, over the store; ``verify``: whether replicas are alike
- ``transport``: shared memory between the ranks of a host, as a backend of c10d
- ``init``, ``launch``, ``cli``, ``doctor``: starting ranks, and looking at them; ``testing``: a pool of live ranks
- ``_torch``: every private torch name that is used
"""

from paceline import errors, hooks, tracing, transport
from paceline.compiler import compile_module as compile
from paceline.compiler import explain
from paceline.init import init, shutdown
from paceline.module import DDP, DistributedDataParallel
from paceline.plan import BucketPlan
from paceline.precision import MixedPrecision
from paceline.sync_batchnorm import SyncBatchNorm
from paceline.verify import assert_replicas_equal

transport.register()

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "BucketPlan",
    "DistributedDataParallel",
    "MixedPrecision",
    "SyncBatchNorm",
    "assert_replicas_equal",
    "compile",
    "errors",
    "explain",
    "hooks",
    "init",
    "shutdown",
    "tracing",
    "transport",
]
