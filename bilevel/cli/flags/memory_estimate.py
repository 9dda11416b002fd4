"""Is there memory for what is asked for? Estimates from below, so that nothing is refused in vain.

A job that cannot fit is otherwise killed by the system, without a word, after minutes or hours.
"""

from typing import Any

from bilevel.internal.memory import available_memory


def check(flags: Any, needs: dict[tuple[str, ...], int]) -> None:
    """Raise for the largest of ``needs``, bytes by names of flags, if there is not as much."""
    if not needs:
        return
    names = max(needs, key=lambda name: needs[name])
    need, free = needs[names], available_memory()
    if need > free:
        values = ", ".join(str(getattr(flags, name)) for name in names)
        raise ValueError(
            f"{', '.join(names)}: expected sizes that fit in the {free / 1e9:,.1f} GB of memory "
            f"available, got {values}, which take at least {need / 1e9:,.1f} GB."
        )
