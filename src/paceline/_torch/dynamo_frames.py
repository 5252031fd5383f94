"""Asks and tells Dynamo what ranks have to agree on while they compile.

Nothing here imports the compiler by itself: the functions are called when somebody else has imported it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

GuardHook = Callable[[bool], bool]
Error = TypeVar("Error", bound=Exception)
# What automatic dynamic shapes know of one input: a number, a size and strides. Each is None if nothing is known of it
# and DYNAMIC if it varies. A stride is ["S", n] if it is what a contiguous layout makes of dimension n.
Sizes = dict[str, list[Any]]
DYNAMIC = "?"


def set_guard_hook(hook: GuardHook | None) -> GuardHook | None:
    """Have ``hook``, which is told whether the guards hold, decide whether compiled code is run. Returns the last hook.

    ``torch.compiler.set_enable_guard_collectives`` is the public face of it, for a hook of torch's own. A hook must
    not raise: the process would end.
    """
    # torch's stubs name the hook's argument, which a callable of ours cannot.
    return eval_frame.set_guard_complete_hook(hook)  # type: ignore[arg-type]


class CompilationWatch:
    """Enters ``around``, a context manager, for each compilation, and calls ``captured`` when a graph is complete.

    ``torch._dynamo.on_compile_start`` and its counterpart are public, but ``torch._dynamo.reset()`` forgets them and
    they do not hear of exceptions. Nothing public says when a graph is complete.
    """

    def __init__(
        self,
        around: Callable[[], contextlib.AbstractContextManager[None]],
        captured: Callable[[Any], None],
    ) -> None:
        self._around = around
        self._captured = captured

    def start(self) -> None:
        from torch._dynamo import callback_handler
        from torch._dynamo.output_graph import OutputGraph

        install = type(callback_handler).install_callbacks
        around, captured = self._around, self._captured

        @contextlib.contextmanager
        def watched(trigger: Any, compile_id: str) -> Iterator[None]:
            with install(callback_handler, trigger, compile_id), around():
                yield

        handler: Any = callback_handler
        handler.install_callbacks = watched
        # Dynamo calls this for every frame that was traced to its end, even if there is nothing to compile. It does
        # nothing by itself, unless torch's own flag is on, which cannot be on at the same time.
        graph: Any = OutputGraph
        self._run_collective = OutputGraph.run_compiler_collective
        graph.run_compiler_collective = lambda output: captured(output)

    def stop(self) -> None:
        from torch._dynamo import callback_handler
        from torch._dynamo.output_graph import OutputGraph

        handler: Any = callback_handler
        del handler.install_callbacks
        graph: Any = OutputGraph
        graph.run_compiler_collective = self._run_collective


def frame_being_compiled() -> str:
    """The name of the code that Dynamo is compiling, the same on all ranks; empty if it is not known.

    Dynamo tells its callbacks only a number. The code is an argument of one of Dynamo's functions further up the stack.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals["__name__"] == "torch._dynamo.convert_frame":
            return _frame_name(frame.f_locals["code"], frame.f_locals["closure"])
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _frame_name(code: CodeType, closure: Any) -> str:
    name = code.co_name
    for cell in closure or ():
        # A module is compiled by way of a function of torch's, whose name is the same for all modules.
        try:
            owner = getattr(cell.cell_contents, "__self__", None)
        except ValueError:
            # The variable is not assigned yet.
            continue
        if isinstance(owner, torch.nn.Module):
            name = f"{type(owner).__qualname__}.{name}"
    return f"{name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


def sizes_of(output: Any) -> Sizes:
    """What automatic dynamic shapes know of the inputs of a captured graph's frame, by source."""
    return {name: _told(entry) for name, entry in _frame_state(output).items()}


def merge_sizes(output: Any, sizes: Sizes) -> bool:
    """Add what other ranks know; True if the captured graph was made on other assumptions."""
    from torch._dynamo.pgo import FrameStateSizeEntry, InferStride, auto_dynamic, auto_unset

    def atom(value: Any) -> Any:
        return auto_dynamic if value == DYNAMIC else InferStride(value[1]) if isinstance(value, list) else value

    def part(value: Any) -> Any:
        return auto_unset if value is None else tuple(map(atom, value)) if isinstance(value, list) else atom(value)

    state = _frame_state(output)
    stale = False
    for name, (scalar, size, stride) in sizes.items():
        known = name in state
        entry = state[name]
        before = _told(entry)
        entry |= FrameStateSizeEntry(scalar=part(scalar), size=part(size), stride=part(stride))
        # Dynamo leaves excluded values to an earlier graph. What another rank saw says nothing about graphs here.
        entry.excluded_sizes = entry.excluded_scalar = None
        stale |= known and _told(entry) != before
    return stale


def _frame_state(output: Any) -> Any:
    from torch._dynamo.pgo import CodeId, get_code_state

    tx = output.root_tx
    return get_code_state()[CodeId.make(tx.f_code, tx.closure)].automatic_dynamic


def _told(entry: Any) -> list[Any]:
    from torch._dynamo.pgo import InferStride, auto_dynamic, auto_unset

    def atom(value: Any) -> Any:
        return DYNAMIC if value is auto_dynamic else ["S", value.dim] if isinstance(value, InferStride) else value

    def part(value: Any) -> Any:
        return None if value is auto_unset else list(map(atom, value)) if isinstance(value, tuple) else atom(value)

    return [part(entry.scalar), part(entry.size), part(entry.stride)]


def trace_again(output: Any) -> Exception:
    """What to raise to have Dynamo trace the frame once more, with what is known now."""
    from torch._dynamo.exc import CompileCollectiveRestartAnalysis

    # The notes about graph breaks belong to a trace that may go another way now.
    output.root_tx.speculation_log.clear()
    return CompileCollectiveRestartAnalysis()


def wrap_graph_backend(output: Any, wrap: Callable[[Any], Any]) -> None:
    """Put ``wrap`` around the backend that a captured graph is about to be given to."""
    output.compiler_fn = wrap(output.compiler_fn)


def runs_uncompiled(error: BaseException) -> bool:
    """Whether an exception of a compilation means that the frame runs uncompiled, unless that is not allowed."""
    from torch._dynamo import exc

    return isinstance(error, (exc.Unsupported, exc.SkipFrame))


def through_compiler(error: Error) -> Error:
    """``error`` in a form that Dynamo lets through as it is. Others come out as internal errors without their class."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(type(error).__name__, (type(error), ShortenTraceback), {"__module__": type(error).__module__})
    passing = kind.__new__(kind, *error.args)
    passing.__dict__.update(error.__dict__, first_useful_frame=None)
    return passing


@contextlib.contextmanager
def backward_compiled_with_forward() -> Iterator[None]:
    """Compile backward graphs together with the forward instead of when backward first runs."""
    import torch._functorch.config as config

    with config.patch(force_non_lazy_backward_lowering=True):
        yield


def name_of_target(target: Any) -> str:
    """The name of what a node of a graph calls. Operators have a name of their own; their class's name says nothing."""
    name = getattr(target, "__qualname__", "")
    is_operator = isinstance(
        target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
    )
    return str(target) if is_operator or not name else f"{target.__module__}.{name}"
