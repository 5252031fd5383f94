"""``paceline.data.Loader``: torch's ``DataLoader``, which counts the batches that the training loop takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from paceline.data.drawing import Drawing
from paceline.data.sampler import Even, Sampler
from paceline.errors import BadArgumentError, BadTypeError, StateError


class Loader(DataLoader[Any]):
    """torch's ``DataLoader`` over this rank's part of a dataset, with a state that can be saved in mid-epoch.

    All arguments are those of ``DataLoader``, and ``seed`` and ``even`` are those of `Sampler`. Without a ``sampler``
    it makes one. A batch counts as trained on when the loop has got it, whatever workers have fetched ahead. So save
    the state after the step of a batch.

    >>> import paceline
    >>> loader = paceline.data.Loader(range(10), batch_size=4)
    >>> batches = iter(loader)
    >>> next(batches)
    tensor([0, 1, 2, 3])
    >>> saved = loader.state_dict()
    >>> loader = paceline.data.Loader(range(10), batch_size=2)
    >>> loader.load_state_dict(saved)
    >>> [batch.tolist() for batch in loader]
    [[4, 5], [6, 7], [8, 9]]
    """

    # Accelerate's prepare() would divide the batches among the ranks once more, and look one batch ahead. It leaves
    # alone what has this mark.
    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        *args: Any,
        seed: int = 0,
        even: Even | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise BadTypeError(
                "A Loader divides a dataset whose samples have numbers. An IterableDataset decides by itself what each "
                "rank gets: use torch.utils.data.DataLoader."
            )
        ours = sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
        if ours is None and batch_sampler is None:
            ours = sampler = Sampler(dataset, shuffle=bool(shuffle), seed=seed, even=even)
        elif shuffle or seed or even is not None:
            raise BadArgumentError("Give shuffle, seed and even to the Sampler, since this Loader is given one.")
        if not isinstance(ours, Sampler):
            raise BadTypeError(
                f"A Loader counts what a paceline.data.Sampler gives out, not a {type(ours).__name__}. Leave the "
                "sampler out, or use torch.utils.data.DataLoader."
            )
        super().__init__(dataset, batch_size, None, sampler, batch_sampler, *args, **kwargs)
        if not self.in_order and self.num_workers:
            raise BadArgumentError(
                "in_order=False lets batches overtake each other, so that nothing can say how far the ranks have come. "
                "Leave it out."
            )
        self._ours = ours
        ours.is_counted = True

    def __iter__(self) -> Any:
        return _CountedBatches(super().__iter__(), self, self._ours)

    def set_epoch(self, epoch: int) -> None:
        """As `Sampler.set_epoch`."""
        self._ours.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """As `Sampler.state_dict`, counting the batches that were taken from this loader."""
        if self.batch_form()[0] is None:
            raise StateError(
                f"Batches of a {type(self.batch_sampler).__name__} have no fixed size (batch_size), so that nothing "
                "can say how far the ranks have come."
            )
        return self._ours.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """As `Sampler.load_state_dict`."""
        self._ours.load_state_dict(state)

    def batch_form(self) -> tuple[int | None, bool]:
        """How many samples a batch has, if that is fixed, and whether the last batch is left out if it has fewer."""
        if self.batch_sampler is None:
            return 1, False
        size = getattr(self.batch_sampler, "batch_size", None)
        return size if isinstance(size, int) else None, bool(getattr(self.batch_sampler, "drop_last", False))


_END = object()


class _CountedBatches:
    """The batches of one pass over a loader."""

    def __init__(self, batches: Iterator[Any], loader: Loader, sampler: Sampler) -> None:
        self._batches, self._loader, self._sampler = batches, loader, sampler
        self._n_batches = 0
        self._drawing: Drawing | None = None

    def __iter__(self) -> _CountedBatches:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        batch = next(self._batches, _END)
        # A DataLoader without workers begins to draw only now. None: another epoch was asked for since the pass began.
        drawing = self._drawing = self._drawing or self._sampler.drawing
        if batch is _END:
            if drawing is not None:
                # This rank may have no sample at all in this pass, which is then over nevertheless.
                drawing.counted_is_all = True
            raise StopIteration
        self._n_batches += 1
        if drawing is not None:
            size, drop_last = self._loader.batch_form()
            drawing.count(self._n_batches, batch_size=size or 1, drop_last=drop_last)
        return batch
