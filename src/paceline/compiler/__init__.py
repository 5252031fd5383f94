"""Compiled training: collectives start from inside the whole backward graph. docs/compiler.md says how and why.

- ``tap``: parameters that a graph reports together, and where their gradients go
- ``ops``: the operators that stand in graphs
- ``graph``: putting taps into a graph that Dynamo has captured
- ``catch``: getting hold of that graph, whatever the backend
- ``run``: what is called instead of the compiled graph: the wrapper's part around it
- ``backend``: saying it explicitly: the backend ``paceline``, and ``paceline.compile``
- ``split``: cutting graphs where buckets end, for backends that need it: ``cut`` (where; ``preparation`` sees to
  it that casts do not matter), ``crossing`` (where not), ``part`` (the graphs), ``chain`` (compiling and running them)
- ``agreement``: ranks compile the same frames at the same time; ``meeting`` (how they talk), ``shapes`` (what they have
  seen), ``fingerprint`` (which graph it is), ``once`` (one rank compiles for all)
- ``record``: what was compiled, and why something was not
- ``placement``: when in backward each bucket leaves; ``explain`` shows it all
"""

from paceline.compiler.agreement import Compilation, CompileAgreement, agreement
from paceline.compiler.backend import Backend, backend, compile_module
from paceline.compiler.catch import Inside, catch
from paceline.compiler.explain import Explanation, explain
from paceline.compiler.ops import enter, leave, tie
from paceline.compiler.run import Mark, Wrapper
from paceline.compiler.split import DDPOptimizer
from paceline.compiler.tap import MAX_TAP_BYTES

__all__ = [
    "MAX_TAP_BYTES",
    "Backend",
    "Compilation",
    "CompileAgreement",
    "DDPOptimizer",
    "Explanation",
    "Inside",
    "Mark",
    "Wrapper",
    "agreement",
    "backend",
    "catch",
    "compile_module",
    "enter",
    "explain",
    "leave",
    "tie",
]
