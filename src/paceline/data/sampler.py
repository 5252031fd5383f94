"""``paceline.data.Sampler``: which samples a rank gets, in which order, and how far the ranks have come.

An epoch is one order of all samples. The ranks take turns in it: with W ranks, rank r takes the places r, r + W,
r + 2 W, and so on. So when every rank has taken the same number of samples, what was taken is the beginning of the
order, and one number says how far that goes. Any number of ranks can go on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler

from paceline.data.drawing import Drawing
from paceline.data.permutation import Permutation
from paceline.errors import BadArgumentError, BadTypeError, StateError

Even = Literal["pad", "drop", "uneven"]
_EVEN: tuple[Even, ...] = ("pad", "drop", "uneven")
# Indices are computed in pieces of this length, and become numbers of Python only then.
_PIECE = 8192


class Sampler(DistributedSampler[int]):
    """Gives each rank its part of a dataset, each sample once, in an order that is new in every epoch.

    It is used as torch's ``DistributedSampler`` is, whose arguments it takes. What is new:

    - Without ``shuffle``, as in an evaluation, no sample comes twice. Some ranks may get one sample more than others.
    - Each pass over all samples is a new epoch. ``set_epoch`` need not be called.
    - Its `state_dict` says how far the ranks have come, and any number of ranks can go on from there.

    Arguments:
        dataset: anything with a length.
        num_replicas: the number of ranks; that of the default process group if None, or 1 if there is none.
        rank: this rank; that of the default process group if None, or 0 if there is none.
        shuffle: whether epochs have an order of their own.
        seed: all ranks must give the same number. Other numbers give other orders.
        drop_last: as ``even="drop"``.
        even: what happens if the ranks cannot get equally many samples. ``"uneven"``: some get one more, and each
            sample comes once. ``"pad"``: the first samples of the order come again at its end. ``"drop"``: its last
            samples are left out. None means ``"pad"`` with ``shuffle`` and ``"uneven"`` without.

    >>> import paceline
    >>> samplers = [paceline.data.Sampler(range(7), num_replicas=2, rank=rank, shuffle=False) for rank in range(2)]
    >>> [list(sampler) for sampler in samplers]
    [[0, 2, 4, 6], [1, 3, 5]]
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        even: Even | None = None,
    ) -> None:
        has_group = dist.is_available() and dist.is_initialized()
        self._must_have_group = not has_group and num_replicas is None
        n_ranks = (dist.get_world_size() if has_group else 1) if num_replicas is None else num_replicas
        place = (dist.get_rank() if has_group else 0) if rank is None else rank
        if not 0 <= place < n_ranks:
            raise BadArgumentError(f"rank is {place}, but num_replicas is {n_ranks}: ranks count from 0.")
        if even is not None and even not in _EVEN:
            raise BadArgumentError(f"even is {even!r}, but must be one of {', '.join(map(repr, _EVEN))}.")
        if drop_last and even not in (None, "drop"):
            raise BadArgumentError(f"drop_last=True means even='drop', but even is {even!r}. Give one of them.")
        if not hasattr(dataset, "__len__"):
            raise BadTypeError(f"A Sampler divides a dataset that has a length; {type(dataset).__name__} has none.")
        self.even: Even = even or ("drop" if drop_last else "pad" if shuffle else "uneven")
        super().__init__(cast("Dataset[Any]", dataset), n_ranks, place, shuffle, seed, self.even == "drop")
        self.num_samples = self._share(0)
        self.total_size = self._end(0) if self.even != "uneven" else len(dataset)
        if not self.num_samples and self.even == "drop" and len(dataset):
            raise BadArgumentError(
                f"A dataset of {len(dataset)} samples leaves none for {n_ranks} ranks with even='drop'."
            )
        self._start = 0
        self._drawing: Drawing | None = None
        self._shift: int | None = 0
        """How far our numbers of epochs are ahead of the caller's; None until the caller has told one after a load."""
        self.is_counted = False
        """A ``paceline.data.Loader`` counts what the training loop takes."""

    def __iter__(self) -> Iterator[int]:
        self._check_group()
        self._move_on()
        self._drawing = Drawing(self.epoch, self._start, self._share(self._start), self.is_counted)
        return self._indices(self._drawing)

    def __len__(self) -> int:
        """How many samples this rank gets in a whole epoch, wherever the next pass begins."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, which has the order of this number. Nobody needs to call this; frameworks do.

        After `load_state_dict`, the first number that comes stands for the epoch that was loaded, because some
        frameworks count from zero again. Other numbers count from there.
        """
        is_over = self._drawing is not None and self._drawing.is_over
        if self._shift is None:
            self._shift = 0 if is_over else self.epoch - epoch
        if epoch + self._shift != self.epoch or is_over:
            self._begin(epoch + self._shift, 0)

    def state_dict(self) -> dict[str, int]:
        """How far the ranks have come: five numbers, which are the same on all ranks that have taken equally many.

        Save them on rank 0, which never has fewer samples than others. A ``paceline.data.Loader`` knows which batches
        the training loop has taken. Without one, what counts is what was drawn from here. A DataLoader with workers
        draws ahead of the loop; then this raises ``StateError``.
        """
        epoch, taken = self.epoch, self._start
        if self._drawing is not None:
            if self._drawing.runs_ahead and not self._drawing.is_counted:
                raise StateError(
                    f"{self._drawing.runs_ahead} draws samples ahead of the training loop, so that the sampler cannot "
                    "know which of them were trained on. Use paceline.data.Loader in the place of "
                    "torch.utils.data.DataLoader, or torchdata's StatefulDataLoader, and save its state_dict()."
                )
            taken += self._drawing.taken * self.num_replicas
            if self._drawing.is_over:
                epoch, taken = epoch + 1, 0
        n_samples = self._size()
        return {
            "epoch": epoch,
            "taken": min(taken, n_samples),
            "samples": n_samples,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state that was saved with any number of ranks. The next pass takes what was left."""
        names = ("epoch", "taken", "samples", "seed", "shuffle")
        missing = [name for name in names if not isinstance(state.get(name), int)]
        if missing:
            raise BadArgumentError(f"This is not the state of a Sampler: {', '.join(missing)} is missing or no number.")
        if state["samples"] != self._size():
            raise BadArgumentError(
                f"The state was saved with a dataset of {state['samples']} samples, and this one has {self._size()}. "
                "Their orders have nothing in common. Begin with a new epoch instead."
            )
        if bool(state["shuffle"]) != self.shuffle:
            raise BadArgumentError(
                f"The state was saved with shuffle={bool(state['shuffle'])}, and this Sampler has "
                f"shuffle={self.shuffle}. Make it with the same."
            )
        if state["epoch"] < 0 or not 0 <= state["taken"] <= state["samples"]:
            raise BadArgumentError(f"This state of a Sampler is damaged: {dict(state)}.")
        self.seed = state["seed"]
        self._begin(state["epoch"], state["taken"])
        self._shift = None

    @property
    def drawing(self) -> Drawing | None:
        """The pass over the samples that began last."""
        return self._drawing

    def _begin(self, epoch: int, start: int) -> None:
        self.epoch, self._start, self._drawing = epoch, start, None

    def _move_on(self) -> None:
        """Where the next pass begins. One that was broken off begins again."""
        if self._drawing is not None and self._drawing.is_over:
            self._begin(self.epoch + 1, 0)

    def _size(self) -> int:
        return len(cast(Sized, self.dataset))

    def _end(self, start: int) -> int:
        """The place in the order at which a pass ends that begins at ``start``."""
        left = self._size() - start
        if self.even == "drop":
            left -= left % self.num_replicas
        elif self.even == "pad":
            left += -left % self.num_replicas
        return start + left

    def _share(self, start: int) -> int:
        """How many samples this rank gets in a pass that begins at ``start``."""
        return len(range(start + self.rank, self._end(start), self.num_replicas))

    def _indices(self, drawing: Drawing) -> Iterator[int]:
        drawing.look_at_caller(self.num_replicas)
        n_samples, ranks = self._size(), self.num_replicas
        order = Permutation(n_samples, key=(self.seed, drawing.epoch)) if self.shuffle else None
        first, end = drawing.start + self.rank, self._end(drawing.start)
        for begin in range(first, end, _PIECE * ranks):
            places = torch.arange(begin, min(end, begin + _PIECE * ranks), ranks)
            # What is behind the end of the order pads it with its beginning.
            places %= n_samples
            for index in (places if order is None else order.at(places)).tolist():
                drawing.drawn += 1
                yield index

    def _check_group(self) -> None:
        if self._must_have_group and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise StateError(
                "This Sampler was made before the process group, so that it does not know the ranks and would give "
                "all samples to each of them. Make it after paceline.init()."
            )
