"""Ranks that compile the same frames at the same time, on the same assumptions. docs/agreement.md says what holds.

[Note: one conversation for each compilation]
Every compilation of a frame that has a graph is a conversation of all ranks, in which each says the same kinds of
notes in the same order: FRAME when tracing has ended, and GRAPH when compiling has. A rank that is about to run
compiled code says GUARDS. If another rank says FRAME at that moment, the guards count as failed, and this rank
compiles, too. The ranks that said FRAME say it once more. So ranks meet, whatever each of them had compiled before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, fx

from paceline import _torch
from paceline.compiler.consensus import shapes
from paceline.compiler.consensus.collectives import Collective, RankCollectives, first_misfit
from paceline.compiler.consensus.compile_exchange import CompileExchange, Note, NoteKind, exchange_of
from paceline.compiler.consensus.fingerprint import Fingerprint, fingerprint, first_difference
from paceline.compiler.consensus.shared_compile import SharedCompile
from paceline.errors import BadArgumentError, DisagreementError, PacelineError, PeerFailedError

OnDifference = Literal["report", "raise"]
_TEXT_LIMIT = 2000
logger = logging.getLogger("paceline.compiler")


@dataclass
class Compilation:
    """One frame that ranks have compiled together."""

    frame: str
    dynamic: tuple[str, ...] = ()
    """The sources that are dynamic on this rank because another rank saw other sizes."""
    difference: str = ""
    """How the graphs of the ranks differ, if they do."""
    source: str = ""
    """With ``once``: where the compiled graph came from, or why it was not shared."""
    graph: Fingerprint | None = field(default=None, repr=False)


class _Agreed:
    """A backend in front of another one. It notes the graph, and leaves nothing to be compiled later."""

    def __init__(self, agreement: CompileAgreement, inner: Callable[..., Any]) -> None:
        self._agreement = agreement
        self._inner = inner
        self.__name__ = getattr(inner, "__name__", type(inner).__name__)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        with _torch.backward_compiled_with_forward():
            return self._agreement.compile(
                gm, lambda: self._inner(gm, example_inputs, **options), kernels=self._writes_kernels(example_inputs)
            )

    def _writes_kernels(self, example_inputs: Sequence[Any]) -> bool:
        """Whether this is Inductor for a CPU, where it compiles kernels in C++."""
        # Our own backend may stand in front of it.
        backend = _torch.original_backend(self._inner)
        devices = {value.device.type for value in example_inputs if isinstance(value, Tensor)}
        return devices == {"cpu"} and _torch.is_inductor(getattr(backend, "inner", backend))


class CompileAgreement:
    """The agreement in force. ``compilations`` has what ranks compiled together, in order."""

    def __init__(self, exchange: CompileExchange, *, on_difference: OnDifference, once: bool) -> None:
        self.compilations: list[Compilation] = []
        self._exchange = exchange
        self._shared = SharedCompile(exchange) if once else None
        self._on_difference = on_difference
        self._thread = 0
        self._watch = _torch.CompilationWatch(self._around, self._captured)
        self._depth = 0
        self._frame = ""
        self._current: Compilation | None = None
        self._error: Exception | None = None
        """What went wrong in the guard hook, where nothing can be raised."""
        self._hook_before: Any = None

    def start(self) -> None:
        """Put the agreement in force for this thread, until `stop`."""
        self._thread = threading.get_ident()
        self._hook_before = _torch.set_guard_hook(self._guards)
        self._watch.start()

    def stop(self) -> None:
        self._watch.stop()
        _torch.set_guard_hook(self._hook_before)

    def is_alive(self) -> bool:
        """Whether its ranks are still a group."""
        return self._exchange.is_alive()

    def raise_error(self) -> None:
        """Raise what went wrong in the guard hook."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    # -- guards --------------------------------------------------------------------------------------

    @_torch.unseen_by_compiler
    def _guards(self, hold: bool) -> bool:
        """Whether all ranks can run their compiled code. Dynamo asks before it runs this rank's."""
        if self._depth or self._is_elsewhere() or self._error is not None:
            return hold
        try:
            notes = self._exchange.gather(NoteKind.GUARDS, flag=hold, doing="the comparison of guards")
        except Exception as error:
            # An exception would end the process here. Failed guards make Dynamo compile, and the error is raised there.
            self._error = error
            return False
        return all(note.kind is NoteKind.GUARDS and note.flag for note in notes)

    # -- a compilation -------------------------------------------------------------------------------

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread. Those compile for themselves, since their order differs between ranks."""
        return threading.get_ident() != self._thread

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        if self._depth or self._is_elsewhere():
            yield
            return
        with _leaving_compiler():
            self.raise_error()
        self._depth, self._current, self._frame = 1, None, _torch.frame_being_compiled() or "a frame"
        self._exchange.say_compiling(self._frame)
        try:
            try:
                yield
            except Exception as error:
                self._ended(error)
                raise
            self._ended(None)
        finally:
            self._depth = 0
            self._exchange.say_compiling("")

    def _captured(self, output: Any) -> None:
        """Hear that a frame was traced to its end."""
        if not self._depth or self._is_elsewhere():
            return
        if self._current is None:
            current = Compilation(self._frame)
            with _leaving_compiler():
                told = self._say_frame(current.frame, shapes.encode(current.frame, _torch.sizes_of(output)))
            # From here on the others wait to hear how it ended.
            self._current = current
            self.compilations.append(current)
            before = _torch.sizes_of(output)
            stale = [_torch.merge_sizes(output, sizes) for sizes in told]
            if any(stale):
                after = _torch.sizes_of(output)
                current.dynamic = tuple(sorted(name for name in before if before[name] != after[name]))
                raise _torch.trace_again(output)
        _torch.wrap_graph_backend(output, lambda inner: _Agreed(self, inner))

    def _say_frame(self, frame: str, body: bytes) -> list[_torch.Sizes]:
        """Say which sizes this rank saw in ``frame``, and return those that other ranks saw there."""
        doing = f"the comparison of what {frame} was given"
        while True:
            notes = self._exchange.gather(NoteKind.FRAME, body=body, frame=frame, doing=doing)
            kinds = {note.kind for note in notes}
            if kinds == {NoteKind.FRAME}:
                break
            if kinds != {NoteKind.FRAME, NoteKind.GUARDS}:
                raise DisagreementError(f"Ranks are out of step in {doing}: {[note.kind.name for note in notes]}.")
        told = [shapes.decode(note.body, rank) for rank, note in enumerate(notes)]
        frames = [frame for frame, _ in told]
        if len(set(frames)) > 1:
            who = "; ".join(f"rank {rank} {frame}" for rank, frame in enumerate(frames))
            raise DisagreementError(
                f"Ranks compile different functions at the same time: {who}. Inside paceline.compiler.agreement all "
                "ranks must call the same compiled functions in the same order, and break graphs in the same places."
            )
        return [sizes for rank, (_, sizes) in enumerate(told) if rank != self._exchange.rank]

    def compile(self, gm: fx.GraphModule, compile_: Callable[[], Any], *, kernels: bool) -> Any:
        """Compile a graph instead of the backend. ``kernels`` says whether the backend writes kernels in C++."""
        current = self._current
        assert current is not None
        current.graph = fingerprint(gm.graph)
        if self._shared is None:
            return compile_()
        with _leaving_compiler():
            compiled, current.source = self._shared.compile(current.frame, current.graph, compile_, kernels=kernels)
        return compiled

    # -- how it ended --------------------------------------------------------------------------------

    def _ended(self, error: Exception | None) -> None:
        """Say how the compilation ended, and wait for all ranks, so that none waits for another in a collective."""
        current = self._current
        if self._exchange.has_ended:
            # The others have heard of the error, or have caused it.
            return
        if current is None:
            if isinstance(error, PacelineError):
                # Ranks parted in this frame, and all have the same error.
                return
            # This rank has no graph and takes no part in the conversation, but others may wait for it there.
            why = "it has no graph there" if error is None else f"{type(error).__name__}: {error}"[:_TEXT_LIMIT]
            self._exchange.say_given_up(self._frame, why)
            return
        graph = current.graph
        body = {
            "failed": f"{type(error).__name__}: {error}"[:_TEXT_LIMIT] if error is not None else "",
            "nodes": graph.node_digests() if graph is not None else [],
            "collectives": graph.collectives if graph is not None else [],
        }
        with _leaving_compiler():
            doing = f"the compilation of {current.frame} by others"
            notes = self._exchange.gather_alike(
                NoteKind.GRAPH, body=json.dumps(body).encode(), doing=doing, patient=True
            )
            if any(note.body != notes[0].body for note in notes):
                told = [_ending(note, rank) for rank, note in enumerate(notes)]
                self._raise_failures(current.frame, error, [failed for failed, _, _ in told])
                ranks = self._exchange.global_ranks
                self._compare_graphs(
                    current,
                    [RankCollectives(rank, nodes, ways) for rank, (_, nodes, ways) in zip(ranks, told, strict=True)],
                )

    def _raise_failures(self, frame: str, error: Exception | None, failed: list[str]) -> None:
        if error is not None and not (_torch.runs_uncompiled(error) and "" in failed):
            return
        if error is not None:
            raise DisagreementError(
                f"{frame} cannot be compiled on rank {self._exchange.rank}, but can on others: {error}. "
                "Let all ranks compile it, or none (torch.compiler.disable)."
            )
        for rank, text in enumerate(failed):
            if text:
                raise PeerFailedError(f"rank {rank} raised while compiling {frame}: {text}", rank=rank)

    def _compare_graphs(self, current: Compilation, told: list[RankCollectives]) -> None:
        misfit = first_misfit(told)
        index = first_difference([each.nodes for each in told]) if misfit is None else misfit
        if index is None:
            return
        mine = current.graph.tell(index) if current.graph is not None else "no graph"
        body = mine.encode(errors="replace")
        notes = self._exchange.gather_alike(NoteKind.NODE, body=body, doing="the comparison of graphs")
        nodes_told = [note.body[:_TEXT_LIMIT].decode(errors="replace") for note in notes]
        lines = "".join(f"\n  rank {rank} has {node}" for rank, node in enumerate(nodes_told))
        current.difference = f"Ranks compiled different graphs of {current.frame}; node {index} is the first:{lines}"
        if misfit is not None:
            raise DisagreementError(
                f"{current.difference}\nTheir collectives differ, so that ranks would wait for ever."
            )
        if self._on_difference == "raise":
            raise DisagreementError(current.difference)
        logger.log(logging.WARNING if self._exchange.rank == 0 else logging.INFO, "%s", current.difference)


def _ending(note: Note, rank: int) -> tuple[str, list[str], list[Collective]]:
    match shapes.read_json(note.body, rank):
        case {"failed": str(failed), "nodes": [*nodes], "collectives": [*ways]} if len(failed) <= _TEXT_LIMIT and all(
            isinstance(node, str) for node in nodes
        ):
            return failed, nodes, [_collective(way, len(nodes), rank) for way in ways]
    raise shapes.refusal(rank)


def _collective(way: Any, n_nodes: int, rank: int) -> Collective:
    match way:
        case [int(node), [*ranks]] if 0 <= node < n_nodes and all(type(each) is int for each in ranks):
            return Collective(node, tuple(ranks))
    raise shapes.refusal(rank)


@contextlib.contextmanager
def _leaving_compiler() -> Iterator[None]:
    """Let an error of ours that is raised inside come out of Dynamo as it is."""
    try:
        yield
    except PacelineError as error:
        raise _torch.through_compiler(error) from None


_stack: list[CompileAgreement | None] = []


def prepare(
    group: dist.ProcessGroup | None = None, *, on_difference: OnDifference = "report", once: bool = False
) -> CompileAgreement | None:
    """An agreement of the ranks of ``group``, not in force yet; None if there are no others. All ranks call it."""
    if on_difference not in ("report", "raise"):
        raise BadArgumentError(f'on_difference must be "report" or "raise", not {on_difference!r}.')
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group if group is not None else _torch.default_group()
    if dist.get_world_size(group) == 1:
        return None
    return CompileAgreement(exchange_of(group), on_difference=on_difference, once=once)


@contextlib.contextmanager
def in_force(inner: CompileAgreement | None) -> Iterator[CompileAgreement | None]:
    """Put ``inner`` in force, and no other, for the time of the context."""
    outer = _stack[-1] if _stack else None
    if outer is not None:
        outer.stop()
    _stack.append(inner)
    if inner is not None:
        inner.start()
    try:
        yield inner
        if inner is not None:
            inner.raise_error()
    finally:
        if inner is not None:
            inner.stop()
        _stack.pop()
        if outer is not None:
            outer.start()


def agreement(
    enabled: bool = True,
    *,
    group: dist.ProcessGroup | None = None,
    on_difference: OnDifference = "report",
    once: bool = False,
) -> contextlib.AbstractContextManager[CompileAgreement | None]:
    """Inside, the ranks of ``group`` (default: all) compile the same frames at the same time; see docs/agreement.md.

    All ranks must enter it, and call the same compiled functions in the same order. ``on_difference="raise"`` makes it
    an error if graphs differ. With ``once`` one rank compiles and the others load what it made, if the ranks have
    a secret (``PACELINE_SECRET``, docs/trust.md). Without other ranks, and with ``enabled=False``, nothing is agreed
    on.

    >>> with paceline.compiler.agreement(True):  # doctest: +SKIP
    ...     compiled(inputs)
    """
    return in_force(prepare(group, on_difference=on_difference, once=once) if enabled else None)


class AgreedCall:
    """A compiled function, called with an agreement of its own in force."""

    def __init__(self, function: Callable[..., Any], *, once: bool) -> None:
        self._function = function
        self._shared = once
        self._agreement: CompileAgreement | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # It is made at the first call: before that there may be no ranks yet, and later there may be others.
        if self._agreement is None or not self._agreement.is_alive():
            self._agreement = prepare(once=self._shared)
        with in_force(self._agreement):
            return self._function(*args, **kwargs)
