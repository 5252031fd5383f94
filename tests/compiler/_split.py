"""Models whose graphs are cut, and what to see of the parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor

from paceline import _torch
from paceline.compiler import DDPOptimizer

WIDTH = 8
# The bytes of one float64 matrix of this width: with it as the cap, each has a part of its own.
MATRIX = WIDTH * WIDTH * 8


class Recorder:
    """A backend that keeps the parts it is given, the inputs they were compiled for and those they ran with."""

    def __init__(self, inner: str | Callable[..., Any] = "eager") -> None:
        self._inner = _torch.find_backend(inner)
        self.graphs: list[torch.fx.GraphModule] = []
        self.examples: list[Sequence[Any]] = []
        self.strides: list[list[tuple[Any, Any]]] = []
        """For each run of a part: what its tensors' strides were taken to be, and what they were."""

    def __call__(self, gm, example_inputs):
        self.graphs.append(gm)
        self.examples.append(list(example_inputs))
        compiled = self._inner(gm, example_inputs)

        def run(*args):
            if not any(isinstance(arg, FakeTensor) for arg in args):
                pairs = [(a, b) for a, b in zip(example_inputs, args, strict=True) if isinstance(b, torch.Tensor)]
                self.strides.append([(a.stride(), b.stride()) for a, b in pairs])
            return compiled(*args)

        return run

    def calls(self, name: str) -> list[int]:
        """How often each part calls a function of this name."""
        return [
            sum(getattr(node.target, "__name__", node.target) == name for node in gm.graph.nodes) for gm in self.graphs
        ]


def same_as_eager(model: nn.Module, compiled: Callable[..., Any], *inputs: Any) -> None:
    """Outputs and gradients of one step are those of the model itself."""
    results = []
    for run in (model, compiled):
        model.zero_grad()
        torch.manual_seed(3)
        outputs = run(*inputs)
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        loss = sum(output.double().square().sum() for output in outputs)
        if loss.requires_grad:
            loss.backward()
        results.append([*(output.detach() for output in outputs), *(param.grad for param in model.parameters())])
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def cut_and_compare(
    model: nn.Module,
    *batches: Sequence[Any],
    cap: int = MATRIX,
    backend: str | Callable[..., Any] = "eager",
    first_cap: int | None = None,
    optimizer: Callable[..., Any] = DDPOptimizer,
    **options: Any,
) -> tuple[Any, Recorder]:
    """Compile ``model`` in parts and run it on each of ``batches``; the optimizer and what its backend saw."""
    torch._dynamo.reset()
    counters.clear()
    recorder = Recorder(backend)
    cutter = optimizer(cap, recorder, first_bucket_cap=first_cap or cap)
    compiled = torch.compile(model, backend=cutter.compile_fn, fullgraph=True, **options)
    for batch in batches:
        same_as_eager(model, compiled, *batch)
    return cutter, recorder


def rows(n: int = 4) -> torch.Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


class Matrices(nn.Module):
    """Three matrices; what is done with them is for subclasses to say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(WIDTH, WIDTH).double() / WIDTH) for _ in range(3))
