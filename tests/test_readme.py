"""The README's example works when pasted."""

import pathlib
import re


def test_the_first_example_runs_and_is_fifteen_lines_at_most(capsys):
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "error_estimate" in printed
    before, after = map(float, printed.splitlines()[-1].split(" -> "))
    assert after < before
