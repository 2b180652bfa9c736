"""Progress bars that callers pass in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Progress = Callable[[Sequence[Any]], Iterable[Any]]
"""Wraps a list, as `rich.progress.track` and `tqdm` do."""


def wrap_with_progress(items: Sequence[Item], progress: Progress | None) -> Iterable[Item]:
    """The items, wrapped if a progress bar was passed."""
    return items if progress is None else progress(items)
