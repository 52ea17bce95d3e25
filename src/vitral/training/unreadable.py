"""Pictures that cannot be read: written down once, told, and too many of them stop a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vitral.data.batches import Batch
from vitral.data.dataset import Item
from vitral.errors import DataError
from vitral.runs import Run


@dataclass(kw_only=True)
class Unreadable:
    reasons: dict[str, str] = field(default_factory=dict)
    """Of every picture, whichever split it is of."""
    of_training: int = 0
    told: int = 0

    def take(self, bad: Iterable[tuple[str, str]], run: Run) -> None:
        for key, reason in bad:
            if key not in self.reasons:
                self.reasons[key] = reason
                run.add_skipped(key, reason)

    def take_batch(self, batch: Batch, items: Sequence[Item], run: Run, most: float) -> None:
        """Those of a batch of training; DataError when they are more than this part of all, or nothing is left."""
        before = len(self.reasons)
        self.take(((items[index].key, reason) for index, reason in batch.bad), run)
        self.of_training += len(self.reasons) - before
        if not len(batch.items) or self.of_training > most * max(len(items), 100):
            index, reason = batch.bad[0] if batch.bad else (0, "")
            raise DataError(
                f"{self.of_training} of {len(items)} pictures cannot be read, such as {items[index].key} ({reason}); "
                f"at most {most:.0%} may.",
                hint="`vitral data` lists them; most_bad sets another limit.",
            )

    def news(self, run: Run) -> str | None:
        """What was found since it was told last."""
        new = list(self.reasons.items())[self.told :]
        self.told = len(self.reasons)
        if not new:
            return None
        (key, reason), more = new[0], f" (and {len(new) - 1} more)" if len(new) > 1 else ""
        return f"Left out, as it cannot be read: {key}, {reason}{more}. All are listed in {run.skipped}."
