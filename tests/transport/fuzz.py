"""Random programs of collectives, run on shm and on gloo by the same ranks, results compared.

    python -m tests.transport.fuzz --programs 2000        the nightly run
    python -m tests.transport.fuzz --seed 1234            one program again, printed step by step

A program is made from its seed alone: collectives of several groups, point-to-point messages, synchronous and
asynchronous, waited for in an order that differs between ranks. What has to be equal:

- to the bit: everything that only moves; integers, bool, MIN and MAX; every sum of two ranks, for x + y = y + x;
- floating-point SUM, AVG and PRODUCT of more ranks: the order of the additions is the transport's own choice (shm
  adds in rank order, gloo along its ring), so each result is within ``2 * n * eps * sum(|x|)`` of the other's for n
  ranks, ``eps`` the dtype's (float16 and bfloat16 are rounded at each step by gloo, once by shm); for PRODUCT the
  product of the ``|x|`` takes the sum's place, and what a step loses below the normal numbers is allowed for.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .fuzz_program import IN_PLACE, REDUCING, Step, numbers, placed, program, world_size_of
from .inputs import reduce_op

BATCH = 50
GROUP_TIMEOUT_S = 20.0

# gloo's works of these have no future.
WITHOUT_FUTURE = ("reduce_scatter", "reduce_scatter_single", "barrier", "message", "message_from_any")

Group = Any
Started = tuple[Any, list[torch.Tensor]]
"""A work, if there is one to wait for, and the outputs."""


# -- running --------------------------------------------------------------------------------------------------


class Run:
    """One program on one set of groups, on one rank."""

    def __init__(self, seed: int, *, rank: int, groups: dict[tuple[tuple[int, ...], int], Group]) -> None:
        self.seed = seed
        self.rank = rank
        self.groups = groups
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self._started: list[tuple[Any, bool]] = []
        self._rng = random.Random(f"{seed}/waits of rank {rank}")

    def run(self) -> dict[int, list[torch.Tensor]]:
        """Outputs by step number."""
        for step in program(self.seed):
            if self.rank in step.members:
                work, self.outputs[step.number] = getattr(self, f"_{step.kind}")(step)
                if work is not None:
                    self._started.append((work, step.kind not in WITHOUT_FUTURE))
            if step.waits:
                self._wait(self._rng.randint(0, len(self._started)))
        self._wait(len(self._started))
        return self.outputs

    def _wait(self, how_many: int) -> None:
        self._rng.shuffle(self._started)
        for _ in range(how_many):
            work, has_future = self._started.pop()
            # Half of them through the future: it is what communication hooks use.
            if has_future and self._rng.random() < 0.5:
                work.get_future().wait()
            else:
                work.wait()

    def _call(self, step: Step, call: Callable[..., Any], *args: Any) -> Any:
        return call(*args, group=self.groups[step.members, step.copy], async_op=step.asynchronous)

    def _mine(self, step: Step, *, piece: int = 0, count: int | None = None) -> torch.Tensor:
        count = step.count if count is None else count
        return placed(numbers(step, self.seed, rank=self.rank, count=count, piece=piece), step.layout)

    def _blank(self, step: Step, count: int | None = None) -> torch.Tensor:
        return torch.zeros(step.count if count is None else count, dtype=step.dtype)

    def _pieces(self, step: Step) -> list[torch.Tensor]:
        return [self._mine(step, piece=piece) for piece in range(len(step.members))]

    def _all_reduce(self, step: Step) -> Started:
        mine = self._mine(step)
        return self._call(step, dist.all_reduce, mine, reduce_op(step.op)), [mine]

    def _reduce(self, step: Step) -> Started:
        mine = self._mine(step)
        root = step.members[step.root]
        work = self._call(step, dist.reduce, mine, root, reduce_op(step.op))
        # Elsewhere the tensor is the transport's to use.
        return work, [mine] if root == self.rank else []

    def _reduce_scatter(self, step: Step) -> Started:
        out = self._blank(step)
        return self._call(step, dist.reduce_scatter, out, self._pieces(step), reduce_op(step.op)), [out]

    def _reduce_scatter_single(self, step: Step) -> Started:
        out, whole = self._blank(step), torch.cat(self._pieces(step))
        return self._call(step, dist.reduce_scatter_single, out, whole, reduce_op(step.op)), [out]

    def _broadcast(self, step: Step) -> Started:
        mine = self._mine(step)
        return self._call(step, dist.broadcast, mine, step.members[step.root]), [mine]

    def _all_gather(self, step: Step) -> Started:
        outs = [self._blank(step) for _ in step.members]
        return self._call(step, dist.all_gather, outs, self._mine(step)), outs

    def _all_gather_single(self, step: Step) -> Started:
        whole = self._blank(step, step.count * len(step.members))
        mine = self._mine(step)
        if step.layout == "offset":
            # This is in place: the input is the rank's own part of the output.
            place = step.members.index(self.rank)
            part = whole[place * step.count : (place + 1) * step.count]
            part.copy_(mine)
            mine = part
        return self._call(step, dist.all_gather_single, whole, mine), [whole]

    def _gather(self, step: Step) -> Started:
        root = step.members[step.root]
        outs = [self._blank(step) for _ in step.members] if root == self.rank else None
        return self._call(step, dist.gather, self._mine(step), outs, root), outs or []

    def _scatter(self, step: Step) -> Started:
        root = step.members[step.root]
        out = self._blank(step)
        return self._call(step, dist.scatter, out, self._pieces(step) if root == self.rank else None, root), [out]

    def _all_to_all(self, step: Step) -> Started:
        outs = [self._blank(step) for _ in step.members]
        return self._call(step, dist.all_to_all, outs, self._pieces(step)), outs

    def _all_to_all_splits(self, step: Step) -> Started:
        place = step.members.index(self.rank)
        most = min(step.count, 3000)

        def split(frm: int, to: int) -> int:
            return random.Random(f"{self.seed}/{step.number}/{frm}/{to}").randint(0, most)

        sends = [split(place, to) for to in range(len(step.members))]
        receives = [split(frm, place) for frm in range(len(step.members))]
        whole = self._mine(step, count=sum(sends))
        out = self._blank(step, sum(receives))
        return self._call(step, dist.all_to_all_single, out, whole, receives, sends), [out]

    def _all_to_all_single(self, step: Step) -> Started:
        whole = self._mine(step, count=step.count * len(step.members))
        out = self._blank(step, step.count * len(step.members))
        return self._call(step, dist.all_to_all_single, out, whole), [out]

    def _barrier(self, step: Step) -> Started:
        return self._call(step, dist.barrier), []

    def _message(self, step: Step) -> Started:
        sender, receiver = step.members[step.root], step.members[step.to]
        place = {"group": self.groups[step.members, step.copy], "tag": step.tag}
        if self.rank == sender:
            return dist.isend(self._mine(step), receiver, **place), []
        if self.rank == receiver:
            out = self._blank(step)
            return dist.irecv(out, None if step.kind == "message_from_any" else sender, **place), [out]
        return None, []

    _message_from_any = _message


# -- comparing ------------------------------------------------------------------------------------------------


def differences(
    seed: int, *, rank: int, shm: dict[int, list[torch.Tensor]], gloo: dict[int, list[torch.Tensor]]
) -> Iterator[str]:
    """What this rank got from shm that it should not have."""
    for step in program(seed):
        for index, (got, want) in enumerate(zip(shm.get(step.number, []), gloo.get(step.number, []), strict=True)):
            if got.numel() == 0 or torch.equal(got, want):
                continue
            bound = _bound(step, seed, rank=rank)
            # Where no difference is allowed, none is computed, because float64 cannot tell all of int64 apart.
            right = (got == want) | (got.isnan() & want.isnan())
            if bound.any():
                # A NaN is beyond no bound, so it is asked what is within it.
                right |= (got - want).abs().double() <= bound
            wrong = (~right).flatten().nonzero().flatten()
            if len(wrong):
                first = int(wrong[0])
                yield (
                    f"{step}, output {index}: {len(wrong)} of {got.numel()} elements differ, first at {first}: "
                    f"shm {got.flatten()[first].item()}, gloo {want.flatten()[first].item()}, "
                    f"bound {bound.expand(got.shape).flatten()[first].item()}"
                )


def _bound(step: Step, seed: int, *, rank: int) -> torch.Tensor:
    """How far apart two right results may be, element by element."""
    real = step.dtype.is_floating_point or step.dtype.is_complex
    members = len(step.members)
    if step.kind not in REDUCING or not real or step.op in ("MIN", "MAX") or (members == 2 and step.op != "AVG"):
        return torch.zeros(1, dtype=torch.float64)
    piece = step.members.index(rank) if step.kind.startswith("reduce_scatter") else 0
    inputs = [numbers(step, seed, rank=member, count=step.count, piece=piece) for member in step.members]
    sizes = [placed(one, step.layout if step.kind in IN_PLACE else "plain").abs().double() for one in inputs]
    info = torch.finfo(step.dtype)
    # What is lost where a number is below the normal ones: half of this, at each step.
    smallest = info.smallest_normal * info.eps
    if step.op == "PRODUCT":
        lost = smallest * functools.reduce(torch.mul, [size.clamp(min=1) for size in sizes])
        return 2 * members * (info.eps * functools.reduce(torch.mul, sizes) + lost)
    if members == 2:
        # An average: the sum of two is exact enough to be equal, and halving it is exact but for those small ones.
        return torch.full_like(sizes[0], smallest)
    total = functools.reduce(torch.add, sizes)
    return 2 * members * (info.eps * (total / members if step.op == "AVG" else total) + smallest)


# -- ranks ----------------------------------------------------------------------------------------------------


def make_groups(world_size: int, backend: str) -> dict[tuple[tuple[int, ...], int], Group]:
    """Two groups for every set of at least two ranks."""
    sets = [s for size in range(2, world_size + 1) for s in itertools.combinations(range(world_size), size)]
    return {(members, copy): dist.new_group(members, backend=backend) for members in sets for copy in range(2)}


def run_programs(rank: int, world_size: int, seeds: list[int], backend: str) -> int:
    """On a rank: run the programs on both transports and compare; returns how many steps were compared."""
    tested, reference = make_groups(world_size, backend), make_groups(world_size, "gloo")
    steps = 0
    for seed in seeds:
        try:
            got = Run(seed, rank=rank, groups=tested).run()
            want = Run(seed, rank=rank, groups=reference).run()
            found = list(differences(seed, rank=rank, shm=got, gloo=want))
        except Exception as error:
            raise AssertionError(f"{_replay(seed)}: {type(error).__name__}: {error}") from error
        if found:
            raise AssertionError(f"{_replay(seed)}:\n" + "\n".join(found))
        steps += len(want)
    return steps


def _replay(seed: int) -> str:
    return f"program {seed} (python -m tests.transport.fuzz --seed {seed})"


def batches(seeds: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Programs that run on the same number of ranks, some at a time."""
    by_size: dict[int, list[int]] = {}
    for seed in seeds:
        by_size.setdefault(world_size_of(seed), []).append(seed)
    for world_size, some in sorted(by_size.items()):
        for start in range(0, len(some), BATCH):
            yield world_size, some[start : start + BATCH]


def main(argv: list[str] | None = None) -> int:
    """Run programs until one fails or all have passed."""
    from paceline.testing import RankError, RankPool

    parser = argparse.ArgumentParser(prog="python -m tests.transport.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=100, metavar="N", help="how many; default 100")
    parser.add_argument("--start", type=int, default=0, metavar="SEED", help="seed of the first; default 0")
    parser.add_argument("--seed", type=int, help="only this program")
    parser.add_argument("--backend", default="cpu:shm", help="what is compared with gloo; default cpu:shm")
    options = parser.parse_args(argv)
    seeds = [options.seed] if options.seed is not None else list(range(options.start, options.start + options.programs))
    if options.seed is not None:
        for step in program(options.seed):
            print(step)
    started = time.monotonic()
    steps = failed = 0
    with RankPool() as pool:
        for world_size, some in batches(seeds):
            try:
                steps += sum(
                    pool.run(
                        run_programs,
                        some,
                        options.backend,
                        world_size=world_size,
                        backend="gloo",
                        timeout=120,
                        group_timeout_s=GROUP_TIMEOUT_S,
                    )
                )
            except RankError as error:
                failed += 1
                print(error)
    print(f"{len(seeds)} programs, {steps} steps of a rank compared in {time.monotonic() - started:.0f} s")
    if failed:
        print(f"{failed} batches FAILED; each names its program above")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
