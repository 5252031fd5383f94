"""The forward of a wrapper: what happens before its module runs, the module's call, and what happens after it.

There are three ways through it:

- an eager call: :meth:`Forward.__call__`
- a compiled graph, which calls :meth:`Forward.enter_graph` before it runs and :meth:`Forward.leave_graph` after
- the tracing of such a graph: :func:`traced_forward`, which only marks where forward begins and ends
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from paceline import _torch, compiler
from paceline.ddp.arguments import Placement
from paceline.ddp.buffers import BufferHookLocation, Buffers, BufferSync
from paceline.ddp.join import Joining
from paceline.ddp.logging_data import Logbook
from paceline.ddp.output_watch import OutputWatch
from paceline.ddp.precision import Swap
from paceline.ddp.same_inputs import SameInputs
from paceline.ddp.sync_batchnorm import told_of_ours
from paceline.ddp.verify import Verifier
from paceline.gradients.outputs import needs_grad, plain_tensors, tie_to_graph
from paceline.reduction import ownership
from paceline.reduction.reducer import Reducer
from paceline.reduction.telemetry import now_ns
from paceline.reduction.usable import check_usable


class Forward:
    """Forwards of one wrapper, one after the other."""

    active: ClassVar[Forward | None] = None
    """The innermost forward that runs now, of whichever wrapper."""

    def __init__(
        self,
        wrapper: nn.Module,
        module: nn.Module,
        reducer: Reducer,
        *,
        placement: Placement,
        buffers: Buffers,
        buffer_sync: BufferSync,
        joining: Joining,
        output_watch: OutputWatch,
        verifier: Verifier | None,
        logbook: Logbook,
    ) -> None:
        self.wrapper = weakref.ref(wrapper)
        self._module, self._reducer, self._placement = module, reducer, placement
        self._buffers, self._buffer_sync, self._joining = buffers, buffer_sync, joining
        self._output_watch, self._verifier, self._logbook = output_watch, verifier, logbook
        self.mark = compiler.Mark(self)
        self._inside = compiler.Inside(self.mark)
        self._inside.listen(module, owner=reducer)
        self._same_inputs: SameInputs | None = SameInputs(reducer.channel) if reducer.channel.size > 1 else None
        self._outer: list[Forward | None] = []
        """The forwards that were active when compiled graphs entered this one."""

    # The compiler does not trace this bookkeeping. It enters the module, and compiles what it can of that.
    @_torch.skipped_by_compiler
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        with record_function("DistributedDataParallel.forward"):
            try:
                inputs, kwargs = self.before(*inputs, **kwargs)
                output = self.run(*inputs, **kwargs)
                return self.after(output)
            except Exception as error:
                told = self._failed(error)
                if told is error:
                    raise
                raise told from error

    @_torch.hidden_from_compiler
    def before(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Do what happens before the module runs: say the word of ``join``, synchronise buffers, move the inputs."""
        reducer, sync = self._reducer, self._buffer_sync
        check_usable(reducer)
        will_sync = torch.is_grad_enabled() and reducer.enabled
        trains = torch.is_grad_enabled() and self._module.training
        reducer.channel.progress.begin_forward(trains=trains and reducer.enabled)
        reducer.origins.forward_ran |= trains and not reducer.roster.is_frozen()
        if trains and self._same_inputs is not None and not self._same_inputs.see((inputs, kwargs)):
            self._same_inputs = None
        if will_sync:
            self._logbook.count_iteration()
            reducer.telemetry.current.forward_start_ns = now_ns()
        if reducer.slots.shared and Forward.active is None:
            ownership.take_over(reducer)
        buffers_due = sync.is_due()
        source = self._joining.say_word(sync_gradients=will_sync and not self._joining.alone, sync_buffers=buffers_due)
        if sync.runs_hook(BufferHookLocation.PRE_FORWARD):
            sync.run_hook()
        elif buffers_due and sync.hook is None:
            sync.broadcast(source=source)
            if self._verifier is not None:
                self._verifier.see_buffers(self._buffers.named())
        return self._placement.move(inputs), self._placement.move(kwargs)

    def run(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.inside():
            return self._inside.call(self._module)(*inputs, **kwargs)

    @_torch.hidden_from_compiler
    def after(self, output: Any) -> Any:
        """Do what happens after the module ran: see to it that a backward of its output is noticed."""
        if not self._end():
            return output
        return self._output_watch.watch(output, every=self._watches_every_output())

    def _end(self) -> bool:
        """The module has run. Return whether a backward that matters to the reducer may follow."""
        if self._buffer_sync.runs_hook(BufferHookLocation.POST_FORWARD):
            self._buffer_sync.run_hook()
        self._reducer.telemetry.current.forward_end_ns = now_ns()
        has_graph = torch.is_grad_enabled()
        self._buffer_sync.note_forward(syncs=has_graph and self._reducer.enabled)
        return has_graph and self._reducer.active

    def _watches_every_output(self) -> bool:
        return self._module.training and self._reducer.enabled

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Mark this wrapper as the one whose forward runs."""
        previous, Forward.active = Forward.active, self
        try:
            yield
        finally:
            Forward.active = previous

    @_torch.hidden_from_compiler
    def _failed(self, error: Exception) -> Exception:
        """An eager forward has raised. Return the error that its caller is to see."""
        told = told_of_ours(error, self._module)
        self._note_failure("forward", told)
        return told

    def _note_failure(self, where: str, error: BaseException) -> None:
        self._logbook.last_error = str(error)
        if self._reducer.channel.size > 1:
            self._reducer.channel.report(where, error)

    # -- what compiled graphs call -------------------------------------------------------------------

    def enter_graph(self) -> None:
        """A compiled graph is about to run in which this wrapper's forward begins."""
        self.before()
        self._outer.append(Forward.active)
        Forward.active = self

    def leave_graph(self, outputs: Sequence[Tensor], *, own: Sequence[Tensor]) -> None:
        """A compiled graph has run in which this wrapper's forward ended.

        ``own`` holds the outputs that come from this forward, and not from the rest of the graph.
        """
        self._leave_outer()
        if self._end():
            self._output_watch.watch_graph(outputs, own=own if self._watches_every_output() else ())

    def graph_failed(self, error: BaseException) -> None:
        self._leave_outer()
        if isinstance(error, Exception):
            self._note_failure("forward", error)

    def compilation_failed(self, error: BaseException) -> None:
        self._note_failure("compiling", error)

    def outdate_graphs(self, reducer: object) -> None:
        if reducer is self._reducer:
            self.mark.renew()

    def _leave_outer(self) -> None:
        if self._outer:
            Forward.active = self._outer.pop()


def traced_forward(
    module: nn.Module,
    inputs: Any,
    kwargs: Any,
    *,
    mark: compiler.Mark,
    placement: Placement,
    swap: Swap | None,
    ignored: set[str],
) -> Any:
    """What the compiler makes a graph of: the module's forward between marks, see :mod:`paceline.compiler`.

    Nothing is read here that changes from step to step, as each such value would be a reason to compile anew.
    """
    compiler.catch_graph(mark)
    compiler.enter(mark.key)
    inputs, kwargs = placement.move(inputs), placement.move(kwargs)
    output = module(*inputs, **kwargs) if swap is None else swap.traced(inputs, kwargs)
    if torch.is_grad_enabled() and module.training:
        output = _tied(output, module, ignored)
    # This comes a second time because a graph break may have begun another graph.
    compiler.catch_graph(mark)
    compiler.leave(plain_tensors(output), mark.key)
    return output


def _tied(output: Any, module: nn.Module, ignored: set[str]) -> Any:
    """Traced: tie ``output`` to some parameter if this rank uses none, or if an input is returned.

    A backward of such an output must be noticed too.
    """
    unused = not needs_grad(output)
    if unused or any(tensor.is_leaf for tensor in plain_tensors(output)):
        for name, param in module.named_parameters():
            if param.requires_grad and name not in ignored:
                chosen = lambda tensor: unused or (tensor.requires_grad and tensor.is_leaf)  # noqa: E731
                return tie_to_graph(output, param, chosen, tie=compiler.tie)
    return output
