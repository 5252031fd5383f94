"""The layout: buckets of a plan, and moving them into memory that ranks share."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor, nn

from paceline.gradients.layout import ALIGNMENT_BYTES, Layout, Pool
from paceline.gradients.plan import make_plan
from paceline.gradients.roster import Roster
from paceline.gradients.slots import Slots


class Memory(mmap.mmap):
    """Memory of one process that stands for shared memory; unlike its parent it can be referred to weakly."""


def _block(size_bytes: int) -> Tensor:
    return torch.frombuffer(Memory(-1, size_bytes), dtype=torch.uint8)


def _layout(module: nn.Module, cap_bytes: int = 100) -> Layout:
    roster = Roster(module, ignored=frozenset(), delayed=frozenset())
    slots = Slots()
    slots.follow(roster)
    plan = make_plan(roster.specs, caps_bytes=(cap_bytes,))
    return Layout(plan, slots.by_id, n_ranks=2, wrapper=1, copy_in_batches=False)


def _flats(layout: Layout) -> list[Tensor]:
    return [bucket.flat for bucket in layout.buckets]


def test_buckets_are_cut_from_one_block_on_cache_lines_of_their_own() -> None:
    layout = _layout(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    blocks: list[Tensor] = []

    def allocate(size_bytes: int) -> Tensor:
        blocks.append(_block(size_bytes))
        return blocks[0]

    layout.share(allocate)
    layout.prepare_storage(is_stable=False)
    (block,) = blocks
    flats = _flats(layout)
    assert len(flats) >= 2
    ends = [0]
    for flat in flats:
        offset = flat.data_ptr() - block.data_ptr()
        assert offset % ALIGNMENT_BYTES == 0
        assert offset >= ends[-1]
        ends.append(offset + flat.nbytes)
        assert flat.untyped_storage().nbytes() == flat.nbytes
    assert ends[-1] <= block.nbytes
    # The last one has room for the status.
    assert flats[-1].numel() == layout.buckets[-1].spec.numel + layout.status_code.numel
    assert layout.sharing_is_settled
    # Nobody keeps buckets that have just been cut, so they stay where they are.
    layout.prepare_storage(is_stable=False)
    assert [flat.data_ptr() for flat in _flats(layout)] == [flat.data_ptr() for flat in flats]


def test_gradients_that_were_there_move_along() -> None:
    module = nn.Linear(5, 5)
    layout = _layout(module)
    layout.prepare_storage(is_stable=False)
    for slot in layout.slots:
        slot.param.grad = slot.view.fill_(float(slot.index + 1))
    before = {flat.data_ptr() for flat in _flats(layout)}
    layout.share(_block)
    assert before.isdisjoint(flat.data_ptr() for flat in _flats(layout))
    for slot in layout.slots:
        assert slot.param.grad is slot.view
        assert torch.equal(slot.param.grad, torch.full_like(slot.param, slot.index + 1.0))


def test_without_shared_memory_buckets_are_ordinary() -> None:
    layout = _layout(nn.Linear(5, 5))
    layout.share(lambda size_bytes: None)
    assert layout.sharing_is_settled
    layout.prepare_storage(is_stable=False)
    assert all(flat is not None for flat in _flats(layout))


def test_a_bucket_that_moves_becomes_ordinary_memory() -> None:
    block = _block(64)
    pool = Pool(block)
    cpu = torch.device("cpu")
    assert pool(16, torch.float32, cpu).data_ptr() == block.data_ptr()
    elsewhere = pool(1, torch.float32, cpu)
    assert elsewhere.numel() == 1
    assert not 0 <= elsewhere.data_ptr() - block.data_ptr() < 64


def test_gradients_outlive_the_layout_and_memory_goes_with_them() -> None:
    module = nn.Linear(5, 5)
    layout = _layout(module)
    memory = [Memory(-1, 4096)]
    gone = weakref.ref(memory[0])
    layout.share(lambda size_bytes: torch.frombuffer(memory.pop(), dtype=torch.uint8))
    layout.prepare_storage(is_stable=False)
    slot = layout.slots[0]
    module.weight.grad = slot.view.fill_(3.0)
    del layout, slot
    assert torch.equal(module.weight.grad, torch.full((5, 5), 3.0))
    assert gone() is not None
    module.weight.grad = None
    assert gone() is None
