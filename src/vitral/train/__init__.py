"""Training: settings, decisions with their reasons, optimisers, what is trained, state that survives, and the loop.

The room can be called: ``vitral.train("photos/")`` is ``vitral.train.begin.train``, and its last event comes when the
report is there, too.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A package and the function of its name cannot both be ``vitral.train``, so the package is the function."""

    def __call__(self, data: str | Path | None = None, **options: Any) -> Iterator[Any]:
        """See ``vitral.train.begin.train``. Settings are checked now; training begins with the first event."""
        from vitral.train.begin import train

        return reported(train(data, **options))


def reported(events: Iterator[Any]) -> Iterator[Any]:
    """The same events; before the last one the report is written, which is the public face's to do."""
    import vitral
    from vitral.train.events import Finished, Measuring

    for event in events:
        if isinstance(event, Finished):
            yield Measuring(what="writing the report", done=0, total=1)
            vitral.write_report(event.folder)
        yield event


sys.modules[__name__].__class__ = _Room
