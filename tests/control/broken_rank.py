"""Runs in which a real rank writes mutated messages into the store of the training that it takes part in.

``python -m tests.control.broken_rank --runs 300`` is the soak; ``test_mutations.py`` has a few runs. The other rank has
the right gradients in each step, or it raises an error of Paceline, and it does not wait longer than the group allows.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP
from paceline.control import peer_wait
from paceline.control.wire import Field, MessageKind
from paceline.errors import PacelineError
from paceline.testing import RankPool
from tests.control._common import group_store
from tests.control.mutator import NUMBERS, Mutator

STEPS = 3
GROUP_TIMEOUT_S = 5.0
BOUND_S = 4 * GROUP_TIMEOUT_S
"""How long a run may take: a wait lasts until the time-out, and a diagnosis follows it."""
BACKENDS = ("gloo", "cpu:shm")
TOPICS = ("parameters after a change", "new parameters", "rows of parameters after a change")

MESSAGES: tuple[tuple[str, MessageKind, tuple[Field, ...]], ...] = (
    ("failure/1", MessageKind.FAILURE, (1, "forward", "KeyError", "'x'", "train.py:88 in load", 0)),
    ("given_up", MessageKind.FAILURE, (1, "forward", "", "rank 1 is gone", "", 3)),
    ("replan/1", MessageKind.REPLAN, (1, 1, "'weight' was frozen")),
    ("whereabouts/1", MessageKind.WHEREABOUTS, (1, 1, 1, 1, "", "its own code", "a.py:1", "", ("1 all-reduce",))),
    ("gone/1", MessageKind.WORD, (("its process has ended",),)),
    ("process/1", MessageKind.PROCESS, (4711, 1, "host")),
    *((f"agree/{topic}/0/1", MessageKind.WORD, ((b"digest",),)) for topic in TOPICS),
    *((f"agree/{topic}/0/verdict", MessageKind.VERDICT, (b"\1\1", (b"x", b"y"))) for topic in TOPICS),
)
COUNTERS = ("failures", "inquiries", "gone")


def train(rank: int, world_size: int, seed: int) -> str:
    """Some steps. Rank 1 is broken. What became of it on this rank: "right", or the name of an error."""
    ddp = DDP(nn.Linear(4, 2))
    change = Mutator(f"broken rank/{seed}")
    store: Any = dist.PrefixStore("looked", group_store())
    # A frozen parameter makes ranks compare their parameters over the store.
    freezes_at = change.rng.choice((None, 1, 2))
    began = time.monotonic()
    try:
        for step in range(STEPS):
            ddp.zero_grad()
            if step == freezes_at:
                ddp.module.bias.requires_grad_(False)
            if rank:
                _break(ddp, change)
                store.set(f"broken/{step}", "")
                # The other rank waits meanwhile, and so it looks at what there is.
                store.wait([f"done/{step}"], timedelta(seconds=BOUND_S))
                ddp(torch.full((3, 4), float(rank + step))).sum().backward()
            else:
                store.wait([f"broken/{step}"], timedelta(seconds=BOUND_S))
                with _looking(store, step):
                    ddp(torch.full((3, 4), float(rank + step))).sum().backward()
                assert torch.equal(ddp.module.weight.grad, torch.full((2, 4), 3 * (step + 0.5))), ddp.module.weight.grad
    except (PacelineError, dist.DistError) as error:
        # The broken rank may get an error of the store itself.
        if rank == 0 and not isinstance(error, PacelineError):
            raise
        return type(error).__name__
    finally:
        with mock.patch.object(sys, "stderr"):
            for step in range(STEPS):
                store.set(f"done/{step}", "")
    assert time.monotonic() - began < BOUND_S
    return "right"


def _break(ddp: DDP, change: Mutator) -> None:
    """Put up some messages where the other rank reads."""
    board = ddp.channel._board
    for key, kind, fields in change.rng.sample(MESSAGES, change.rng.choice((1, 2, 5))):
        board.set(key, change.message(kind, *fields, place=f"{board.name}/{key}"))
    # TCPStore hangs up on whoever counts what is no number, so these are numbers.
    for key in change.rng.sample(COUNTERS, change.rng.choice((0, 1, 3))):
        board.store.set(key, str(change.rng.choice((1, 2, *NUMBERS))))


def _looking(store: Any, step: int) -> Any:
    """Let waits look at the other rank at once, and tell it when they have."""
    look = peer_wait.PeerWait._look

    def looked(wait: peer_wait.PeerWait) -> None:
        try:
            look(wait)
        finally:
            store.set(f"done/{step}", "")

    return mock.patch.multiple(peer_wait.PeerWait, _look=looked)


def run(pool: RankPool, seed: int) -> list[str]:
    """What became of one run, by rank."""
    rng = random.Random(seed)
    return pool.run(
        train, seed, world_size=2, backend=rng.choice(BACKENDS), timeout=3 * BOUND_S, group_timeout_s=GROUP_TIMEOUT_S
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.control.broken_rank", description=__doc__)
    parser.add_argument("--runs", type=int, default=300, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    outcomes: collections.Counter[str] = collections.Counter()
    wrong = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="broken-") as directory, RankPool() as pool:
        os.environ["PACELINE_JOB_DIR"] = directory
        for seed in range(options.seed, options.seed + options.runs):
            try:
                outcomes[run(pool, seed)[0]] += 1
            except Exception as error:
                wrong.append(f"seed {seed}: {error}")
    for text in wrong:
        print(text)
    print(", ".join(f"{name} {count}" for name, count in outcomes.most_common()))
    print(f"{options.runs} runs with a broken rank in {time.monotonic() - started:.0f} s, {len(wrong)} faults found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
