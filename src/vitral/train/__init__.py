"""Training: settings, decisions with their reasons, optimisers, what is trained, state that survives, and the loop.

The room can be called: ``vitral.train("photos/")`` is ``vitral.train.loop.train``.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A package and the function of its name cannot both be ``vitral.train``, so the package is the function."""

    def __call__(self, data: str | Path | None = None, **options: Any) -> Iterator[Any]:
        from vitral.train.loop import train

        return train(data, **options)


sys.modules[__name__].__class__ = _Room
