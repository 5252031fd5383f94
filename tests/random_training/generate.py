"""A program from its seed: plain steps, and a few themes that are drawn for it.

A program has only a few themes, so that a defect of one of them does not hide what the others would show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .program import (
    RANKS,
    Backward,
    Cast,
    Change,
    Compile,
    Copy,
    Ema,
    Fault,
    Freeze,
    Hook,
    Load,
    Net,
    Op,
    Options,
    Program,
    Step,
    ZeroGrad,
)


class _Draft:
    """The program so far, and what draws the rest of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"{seed}/training")
        self.nets: list[Net] = []
        self.ops: list[Op] = []
        self.data = 0

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def net(self) -> int:
        return self.rng.randrange(len(self.nets))

    def layer(self, net: int) -> int:
        return self.rng.randrange(self.nets[net].layers)

    def one_rank(self) -> tuple[int, ...]:
        return (self.rng.choice(RANKS),)

    def backward(self, net: int, **given: Any) -> Backward:
        self.data += 1
        return Backward(net=net, data=self.data, **given)

    def some_layers(self, net: int) -> tuple[int, ...] | None:
        layers = range(self.nets[net].layers)
        return tuple(sorted(self.rng.sample(layers, self.rng.randint(1, len(layers)))))

    def end_step(self, *nets: int) -> None:
        for net in nets:
            if self.chance(0.9):
                self.ops.append(Step(net))
        for net in nets:
            if self.chance(0.85):
                self.ops.append(ZeroGrad(net, set_to_none=self.chance(0.7)))

    def step(self, backward: Backward) -> None:
        self.ops.append(backward)
        nets = [backward.net] if backward.through is None else [backward.net, backward.through]
        self.end_step(*dict.fromkeys(nets))


def _plain(draft: _Draft) -> None:
    draft.step(draft.backward(draft.net()))


def _bare(draft: _Draft) -> None:
    draft.step(draft.backward(draft.net(), way=draft.rng.choice(("module", "layers"))))


def _branches(draft: _Draft) -> None:
    net = draft.net()
    way = draft.rng.choice(("wrapper", "wrapper", "module"))
    draft.step(draft.backward(net, use=tuple(draft.some_layers(net) for _ in RANKS), way=way))


def _checkpoint(draft: _Draft) -> None:
    way = draft.rng.choice(("wrapper", "wrapper", "module"))
    draft.step(draft.backward(draft.net(), checkpoint=draft.rng.choice(("reentrant", "recomputed")), way=way))


def _closure(draft: _Draft) -> None:
    net = draft.net()
    draft.ops += [draft.backward(net, closure=True), ZeroGrad(net)]


def _no_sync(draft: _Draft) -> None:
    net = draft.net()
    draft.ops.append(draft.backward(net, no_sync=draft.rng.choice(("around", "backward"))))
    draft.step(draft.backward(net, way=draft.rng.choice(("wrapper", "wrapper", "module"))))


def _accumulate(draft: _Draft) -> None:
    draft.step(draft.backward(draft.net(), repeat=(draft.rng.randint(1, 3), draft.rng.randint(1, 3))))


def _weighted(draft: _Draft) -> None:
    weights: list[float | None] = [draft.rng.choice((0.0, 1.0, 2.5, 7.0)) for _ in RANKS]
    if draft.chance(0.05):
        weights[draft.rng.choice(RANKS)] = None
    repeat = (draft.rng.randint(1, 2), draft.rng.randint(1, 2))
    draft.step(draft.backward(draft.net(), weight=tuple(weights), repeat=repeat))


def _twice(draft: _Draft) -> None:
    draft.step(draft.backward(draft.net(), twice=True))


def _penalty(draft: _Draft) -> None:
    draft.step(draft.backward(draft.net(), penalty=True, way=draft.rng.choice(("wrapper", "wrapper", "module"))))


def _chain(draft: _Draft) -> None:
    first, second = _two(draft)
    ways = draft.rng.choice((("wrapper", "wrapper"), ("wrapper", "module"), ("module", "wrapper")))
    draft.step(draft.backward(first, through=second, way=ways[0], through_way=ways[1]))


def _branching_chain(draft: _Draft) -> None:
    """Two nets in one backward, of which ranks use different layers, perhaps the first net before and behind."""
    first, second = _two(draft)
    uses = [tuple(draft.some_layers(net) for _ in RANKS) for net in (first, second)]
    again = draft.chance(0.3)
    for _ in range(2):
        draft.step(draft.backward(first, through=second, use=uses[0], through_use=uses[1], again=again))


def _in_turns(draft: _Draft) -> None:
    """As a GAN trains: the generator through the frozen discriminator, then the discriminator by itself."""
    maker, critic = _two(draft)
    way, through_way = draft.rng.choice(("wrapper", "wrapper", "module")), draft.rng.choice(("wrapper", "module"))
    for _ in range(draft.rng.randint(1, 2)):
        draft.ops += [Freeze(critic), draft.backward(maker, through=critic, way=way, through_way=through_way)]
        draft.end_step(maker)
        draft.ops += [Freeze(critic, on=False), Freeze(maker)]
        if draft.chance(0.5):
            draft.ops.append(draft.backward(maker, through=critic, way=way, through_way=through_way))
        else:
            draft.ops.append(draft.backward(critic, way=through_way))
        draft.end_step(critic)
        draft.ops.append(Freeze(maker, on=False))


def _halves_in_turns(draft: _Draft) -> None:
    """Two halves of one wrapped module are trained in turns, each while the other is frozen."""
    net = draft.net()
    layers = range(draft.nets[net].layers)
    middle = draft.rng.randrange(1, len(layers))
    halves = [tuple(layers[:middle]), tuple(layers[middle:])]
    way = draft.rng.choice(("wrapper", "module", "layers"))
    for turn in range(draft.rng.randint(2, 3)):
        trained, still = halves[turn % 2], halves[1 - turn % 2]
        draft.ops += [Freeze(net, layer) for layer in still]
        draft.ops += [Freeze(net, layer, on=False) for layer in trained]
        draft.step(draft.backward(net, way=way, use=(trained, trained) if draft.chance(0.5) else (None, None)))
    draft.ops.append(Freeze(net, on=False))


def _freeze(draft: _Draft) -> None:
    net = draft.net()
    layer = draft.layer(net)
    draft.ops.append(Freeze(net, layer))
    for _ in range(draft.rng.randint(1, 2)):
        draft.step(draft.backward(net, way=draft.rng.choice(("wrapper", "wrapper", "module"))))
    if draft.chance(0.8):
        draft.ops.append(Freeze(net, layer, on=False))
    draft.step(draft.backward(net))


def _freeze_all(draft: _Draft) -> None:
    net = draft.net()
    draft.ops += [Freeze(net), draft.backward(net), Freeze(net, on=False)]
    draft.step(draft.backward(net))


def _hook(draft: _Draft) -> None:
    kind = draft.rng.choice(("tensor", "forward", "full_backward", "post_look", "post_scale", "post_step"))
    net = draft.net()
    hook = Hook(net, draft.layer(net), kind)
    if draft.chance(0.4) and draft.nets[net].shares is None:
        draft.nets[net] = replace(draft.nets[net], hooks=(*draft.nets[net].hooks, hook))
    else:
        draft.ops.append(hook)
    draft.step(draft.backward(net))


def _ema(draft: _Draft) -> None:
    net = draft.net()
    for _ in range(2):
        draft.ops.append(Ema(net))
        draft.step(draft.backward(net))


def _copy(draft: _Draft) -> None:
    net = draft.net()
    draft.ops.append(Copy(net, draft.rng.choice(("wrapper", "module", "rewrap"))))
    draft.step(draft.backward(net, way=draft.rng.choice(("wrapper", "wrapper", "module"))))


def _load(draft: _Draft) -> None:
    net = draft.net()
    draft.ops.append(Load(net, assign=draft.chance(0.5), way=draft.rng.choice(("wrapper", "module"))))
    draft.step(draft.backward(net))


def _cast(draft: _Draft) -> None:
    net = draft.net()
    draft.ops.append(Cast(net, "float32"))
    draft.step(draft.backward(net))
    if draft.chance(0.7):
        draft.ops.append(Cast(net, "float64"))
        draft.step(draft.backward(net))


def _change(draft: _Draft) -> None:
    net = draft.net()
    draft.data += 1
    what = draft.rng.choice(("add", "replace", "swap"))
    draft.ops.append(Change(net, what, data=draft.data, differs=draft.chance(0.15)))
    draft.step(draft.backward(net, way=draft.rng.choice(("wrapper", "wrapper", "module"))))


def _fault(draft: _Draft) -> None:
    net = draft.net()
    phase = draft.rng.choice(("forward", "forward", "backward", "loss"))
    one = draft.chance(0.4)
    fault = Fault(
        phase,
        draft.rng.randrange(3),
        ranks=draft.one_rank() if one else RANKS,
        retry=draft.chance(0.8 if one else 0.3),
    )
    draft.step(draft.backward(net, fault=fault, way=draft.rng.choice(("wrapper", "wrapper", "module"))))
    draft.step(draft.backward(net))


def _skip(draft: _Draft) -> None:
    """A rank skips a step, as with ``continue``; mostly the other one skips one later."""
    net = draft.net()
    skips = draft.rng.choice(RANKS)
    draft.ops.append(draft.backward(net, ranks=(1 - skips,)))
    if draft.chance(0.8):
        draft.ops.append(draft.backward(net, ranks=(skips,)))
    draft.end_step(net)


def _lone_bare(draft: _Draft) -> None:
    """One rank looks at gradients of the bare module, and the other trains."""
    net = draft.net()
    draft.ops.append(draft.backward(net, way=draft.rng.choice(("module", "layers")), ranks=draft.one_rank()))
    draft.step(draft.backward(net))


def _crossed(draft: _Draft) -> None:
    """Ranks train two nets in a different order. If the nets are alike, so are their collectives."""
    if len(draft.nets) < 2:
        draft.nets.append(replace(draft.nets[0], hooks=()))
    first, second = draft.backward(0, ranks=(0,)), draft.backward(1)
    draft.ops += [first, second, replace(first, ranks=(1,))]
    draft.end_step(0, 1)


def _lone_change(draft: _Draft) -> None:
    """One rank freezes or casts, and the other does not."""
    net, rank = draft.net(), draft.one_rank()
    draft.ops.append(draft.rng.choice((Freeze(net, draft.layer(net), ranks=rank), Cast(net, "float32", ranks=rank))))
    draft.step(draft.backward(net))


def _lone_no_sync(draft: _Draft) -> None:
    """One rank has more to accumulate than the other: nobody waits, as nothing is synchronised."""
    net = draft.net()
    draft.ops.append(draft.backward(net, no_sync="around", ranks=draft.one_rank()))
    draft.step(draft.backward(net))


def _compile(draft: _Draft) -> None:
    net = draft.net()
    draft.ops.append(Compile(net, draft.rng.choice(("eager", "aot_eager"))))
    draft.step(draft.backward(net))
    draft.step(draft.backward(net))
    if draft.chance(0.5):
        draft.ops.append(Compile(net, ""))


def _two(draft: _Draft) -> Sequence[int]:
    if len(draft.nets) < 2:
        draft.nets.append(_some_net(draft.rng))
    return draft.rng.sample(range(len(draft.nets)), 2)


_Theme = Callable[[_Draft], None]
# How often each is drawn. What ends in a refusal, or compiles, takes seconds, and is drawn less often.
THEMES: dict[_Theme, float] = {
    **dict.fromkeys((_bare, _branches, _checkpoint, _closure, _no_sync, _accumulate, _weighted, _twice), 3),
    **dict.fromkeys((_penalty, _chain, _branching_chain, _freeze, _hook, _ema, _copy, _load, _cast, _change), 3),
    **dict.fromkeys((_in_turns, _halves_in_turns, _fault, _lone_no_sync), 2),
    **dict.fromkeys((_freeze_all, _skip, _lone_bare, _lone_change, _crossed), 0.5),
    _compile: 0.5,
}


def _some_net(rng: random.Random, shares: int | None = None, width: int = 0) -> Net:
    return Net(layers=rng.randint(2, 4), width=width or rng.randint(2, 4), shares=shares)


def generate(seed: int) -> Program:
    """The program of a seed."""
    draft = _Draft(seed)
    rng = draft.rng
    draft.nets.append(_some_net(rng))
    if draft.chance(0.3):
        shares = 0 if draft.chance(0.4) else None
        draft.nets.append(_some_net(rng, shares, draft.nets[0].width if shares == 0 else 0))
    themes = rng.choices(list(THEMES), weights=list(THEMES.values()), k=rng.randint(1, 3))
    if rng.random() < 0.5:
        _plain(draft)
    for _ in range(rng.randint(1, 4)):
        rng.choice([*themes, _plain])(draft)
    for theme in themes:
        theme(draft)
    _plain(draft)
    options = Options(
        small_buckets=draft.chance(0.5),
        find_unused_parameters=draft.chance(0.2),
        gradient_as_bucket_view=draft.chance(0.3),
        verify_every=rng.choice((0, 0, 0, 1, 2)),
        momentum=rng.choice((0.0, 0.9)),
    )
    backend = rng.choice(("gloo", "cpu:shm"))
    program = Program(seed, backend, options, tuple(draft.nets), tuple(draft.ops))
    return replace(program, ops=tuple(map(_compilable, program.ops))) if program.compiles else program


def _compilable(op: Op) -> Op:
    """Without what torch.compile itself refuses: a second backward through a compiled graph, raising in it, swaps."""
    if isinstance(op, Change) and op.what == "swap":
        return replace(op, what="replace")
    return replace(op, penalty=False, twice=False, fault=None) if isinstance(op, Backward) else op
