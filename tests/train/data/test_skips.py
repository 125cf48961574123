"""The skip list: skipped and used samples, the file, and the lists that a checkpoint accepts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from train.data.stages import NO_SKIPS, STAGE_BITS, SkipList, append_to_skip_list, read_skip_list


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), max_size=30))
def test_the_rest_keeps_its_order(indices: list[int]) -> None:
    skip = SkipList(tuple(indices))
    rest = [index for index in range(200) if index not in indices]
    assert skip.index_of_used(np.arange(100)).tolist() == rest[:100]
    numbers = {index: number for number, index in enumerate(rest)}
    assert skip.number_of(np.arange(200)).tolist() == [numbers.get(index, -1) for index in range(200)]


def test_file_grows_and_is_read_back(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    assert read_skip_list(run, "") is NO_SKIPS
    assert append_to_skip_list(run, "skip.txt", [7, 3], "loss spike\nat step 4").indices == (7, 3)
    assert append_to_skip_list(run, "skip.txt", [12], "again").indices == (7, 3, 12)
    assert (tmp_path / "train/skip.txt").read_text() == (
        "7  # loss spike at step 4\n3  # loss spike at step 4\n12  # again\n"
    )


def test_a_hand_written_file_may_lack_its_last_newline(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    run.write_atomic("train/skip.txt", b"# by hand\n\n5")
    assert append_to_skip_list(run, "skip.txt", [6], "x").indices == (5, 6)


def test_missing_file_and_bad_line_are_rejected(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    with pytest.raises(ConfigError, match=r"train.skip_file: expected a file .*train/gone.txt, got none"):
        read_skip_list(run, "gone.txt")
    run.write_atomic("train/skip.txt", b"4\n-5 # negative\n")
    with pytest.raises(ContractError, match=r"skip.txt, line 2: expected a sample index from 0 to .* got '-5'"):
        read_skip_list(run, "skip.txt")


def test_digest_depends_on_entries_and_their_order() -> None:
    assert SkipList((1, 2)).digest == SkipList((1, 2)).digest
    assert len({NO_SKIPS.digest, SkipList((1, 2)).digest, SkipList((2, 1)).digest, SkipList((1,)).digest}) == 4


def test_a_list_may_grow_by_samples_not_yet_reached() -> None:
    present = SkipList((3,))
    # Ten samples used under the present list are 0..10 without 3, so 11 is the first not reached.
    SkipList((3, 11)).check_continues(1, present.digest, used=10)
    present.check_continues(1, present.digest, used=10)
    with pytest.raises(ContractError, match=r"new entries from sample 11 on, got \[10\]"):
        SkipList((3, 10)).check_continues(1, present.digest, used=10)


@pytest.mark.parametrize("changed", [(4,), (), (4, 3)])
def test_an_edited_list_is_rejected(changed: tuple[int, ...]) -> None:
    present = SkipList((3,))
    with pytest.raises(
        ContractError, match=rf"1 entries with digest {present.digest[:12]}.*got {len(changed)} entries"
    ):
        SkipList(changed).check_continues(1, present.digest, used=0)


def test_stages_have_their_own_entries() -> None:
    second = 1 << STAGE_BITS
    skip = SkipList((7, second + 4, 3, second, second - 1, 2 * second))
    assert [skip.of_stage(stage).indices for stage in range(4)] == [(3, 7, second - 1), (0, 4), (0,), ()]
    assert (skip.last_stage, NO_SKIPS.last_stage) == (2, 0)


def test_a_list_may_grow_in_later_stages_and_not_in_completed_stages() -> None:
    second = 1 << STAGE_BITS
    present = SkipList((3, second + 1))
    # Two samples of the second stage are used: 0 and 2, since 1 is skipped.
    SkipList((3, second + 1, second + 3)).check_continues(2, present.digest, used=2, stage=1)
    for late in (second + 2, second, 10**6):
        with pytest.raises(ContractError, match=rf"new entries from sample {second + 3} on, got \[{late}\]"):
            SkipList((3, second + 1, late)).check_continues(2, present.digest, used=2, stage=1)
    SkipList((3, second + 1, second)).check_continues(2, present.digest, used=9, stage=0)
