"""Quick attacks of ``benchmarks/reliability/crashes.py``; kills need separate processes."""

import numpy as np
import pytest

from benchmarks.reliability import crashes, nonfinite, victims


@pytest.mark.long
@pytest.mark.parametrize("number", range(2))
def test_a_search_stops_where_a_quantity_is_not_finite(number):
    outcome = nonfinite.nonfinite(1, number)
    assert outcome.verdict == "right", outcome


@pytest.mark.filterwarnings("ignore:journal")  # of lines that are computed again
def test_a_journal_with_a_flipped_bit_gives_the_exact_trace_or_is_refused(tmp_path):
    rng = np.random.default_rng(1)
    truth = victims.sharing(tmp_path / "whole")
    lines = (tmp_path / "whole" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for i in range(8):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(b"".join(lines[:3]))
        flip = crashes.flipped(folder, rng)
        try:
            arrays = victims.sharing(folder)
        except ValueError as error:
            assert not victims.not_a_message(error), flip
        else:
            for name, expected in truth.items():
                assert arrays[name].tobytes() == expected.tobytes(), flip
