"""Compiled training: collectives start from inside the whole backward graph. docs/compiler.md says how and why.

- ``taps``: graphs whose backward reports its gradients while it runs
- ``split``: graphs that are cut where buckets end, for backends that need it
- ``consensus``: ranks that compile the same frames at the same time, or one rank for all
- ``backend``: gives graphs with taps, or subgraphs, to another backend; has ``paceline.compile`` and the named backend
- ``graph_capture``: gets hold of the graph that Dynamo captures, whatever its backend
- ``record``: what was compiled, and why something was not; ``placement``: when in backward each bucket left;
  ``explain``: shows both
- ``graph_values``: what the nodes of a captured graph stand for
"""

from paceline.compiler.backend import Backend, backend, compile_module
from paceline.compiler.consensus.compile_agreement import Compilation, CompileAgreement, agreement
from paceline.compiler.explain import Explanation, GraphBreak, explain
from paceline.compiler.graph_capture import Inside, catch_graph
from paceline.compiler.split.graph_split import DDPOptimizer
from paceline.compiler.taps.graph_run import Mark, Wrapper
from paceline.compiler.taps.ops import enter, leave, tie
from paceline.compiler.taps.tap import MAX_TAP_BYTES

__all__ = [
    "MAX_TAP_BYTES",
    "Backend",
    "Compilation",
    "CompileAgreement",
    "DDPOptimizer",
    "Explanation",
    "GraphBreak",
    "Inside",
    "Mark",
    "Wrapper",
    "agreement",
    "backend",
    "catch_graph",
    "compile_module",
    "enter",
    "explain",
    "leave",
    "tie",
]
