"""Which sample comes when, and what is in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.execution.data.encoding import Encoded
from stagewright.execution.data.order import _BLOCK, Permutation, SampleOrder, number_of
from stagewright.execution.data.samples import Packs, Windows
from stagewright.execution.data.store import TokenStore, write_store
from stagewright.execution.data.tokenizers import load_tokenizer


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 700), st.integers(0, 2**62))
def test_a_permutation_has_every_number_once(size: int, seed: int) -> None:
    order = Permutation(size, seed)
    assert sorted(order[place] for place in range(size)) == list(range(size))
    with pytest.raises(IndexError):
        order[size]


def test_every_epoch_has_all_samples_in_an_order_of_its_own() -> None:
    order = SampleOrder([97], [1.0], seed=5)
    epochs = [[order[epoch * 97 + place][1] for place in range(97)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(97)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != [SampleOrder([97], [1.0], seed=6)[place][1] for place in range(97)]
    # Neighbours in the data are none in the order.
    assert sum(abs(one - other) == 1 for one, other in zip(epochs[0], epochs[0][1:], strict=False)) < 10


def test_any_sample_is_known_without_those_before_it() -> None:
    whole = SampleOrder([50, 30, 7], [0.2, 0.5, 0.3], seed=1)
    known = [whole[number] for number in range(400)]
    for number in (399, 3, 250, 0):
        assert SampleOrder([50, 30, 7], [0.2, 0.5, 0.3], seed=1)[number] == known[number]


def test_a_mixture_has_its_shares_and_takes_each_source_epoch_by_epoch() -> None:
    order = SampleOrder([40, 10], [3.0, 1.0], seed=2)
    drawn = [order[number] for number in range(4000)]
    assert 0.72 < sum(source == 0 for source, _ in drawn) / 4000 < 0.78
    in_block = [
        order._given(source, block + 1) - order._given(source, block)
        for block in range(3)
        for source in (0, 1)
    ]
    assert in_block == [_BLOCK * 3 // 4, _BLOCK // 4] * 3
    # A whole block uses every place of each source's own order once.
    small = pytest.MonkeyPatch()
    small.setattr("stagewright.execution.data.order._BLOCK", 200)
    try:
        counts = [SampleOrder([40, 10], [3.0, 1.0], seed=2)._source(number) for number in range(600)]
    finally:
        small.undo()
    assert sorted(counts) == [(0, count) for count in range(450)] + [(1, count) for count in range(150)]


def test_steps_of_several_lengths_take_the_samples_of_their_length_in_turn() -> None:
    lengths, seen = (8, 16, 8), {8: 0, 16: 0}
    for step in range(20):
        length = lengths[step % 3]
        assert number_of(step, lengths, 4) == seen[length]
        seen[length] += 4


# -- packing ------------------------------------------------------------------------------------------------------------


def store_of(folder: Path, sizes: list[int], num_prompt: int = 2) -> TokenStore:
    """Documents of distinct tokens, of which the first are a prompt."""
    made, start = [], 0
    for size in sizes:
        ids = np.arange(start, start + size) % 256
        made.append(Encoded(ids, np.arange(size) >= num_prompt if num_prompt else None))
        start += size
    return write_store(folder / "store", made, load_tokenizer(None), "made")


def test_windows_cut_all_documents_without_a_gap() -> None:
    windows = Windows(np.arange(25, dtype=np.uint8), 8)
    assert windows.size == 3
    assert np.concatenate([windows[index].ids for index in range(3)]).tolist() == list(range(24))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(0, 99))
def test_packs_have_every_document_whole_and_once(sizes: list[int], seed: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store = store_of(Path(folder), sizes)
        packs = Packs(store, 16, seed)
        assert packs.size is not None
        assert sorted(document for pack in packs._packs for document in pack) == list(range(len(sizes)))
        starts = np.cumsum([0, *sizes[:-1]])
        for index, documents in enumerate(packs._packs):
            sample, place = packs[index], 0
            assert sample.learnt is not None and sample.positions is not None
            for document in documents:
                size = min(sizes[document], 16)
                here = slice(place, place + size)
                assert (sample.ids[here] == (np.arange(size) + starts[document]) % 256).all()
                assert sample.learnt[here].tolist() == [at >= 2 for at in range(size)]
                assert sample.positions[here].tolist() == list(range(size))
                place += size
            assert place <= 16 and not sample.learnt[place:].any()


def test_packs_are_full(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    sizes = chance.integers(1, 200, 500).tolist()
    packs = Packs(store_of(tmp_path, sizes), 256, seed=0)
    assert packs.size is not None and sum(sizes) / (packs.size * 256) > 0.93
