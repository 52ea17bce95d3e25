"""Report: what became of every tensor when a checkpoint was loaded. Nothing happens to weights that is not in it."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Every tensor of the file is in taken, renamed, resized or ignored, and every new one of the model in fresh."""

    source: str
    dialect: str
    format: str
    taken: tuple[str, ...] = ()
    """Under the same name."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Their name: ours."""
    resized: dict[str, str] = field(default_factory=dict)
    """Their name: our name and what was done."""
    fresh: dict[str, str] = field(default_factory=dict)
    """Our name: why it is not from the file."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Their name: why it is not needed."""
    assumed: tuple[str, ...] = ()
    """What the file does not tell."""
    warnings: tuple[str, ...] = ()
    """What may surprise."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        counts = [f"{len(self.taken)} taken"]
        counts += [f"{len(part)} {name}" for name, part in self._parts().items() if part]
        lines = [f"{self.source}: {self.dialect} ({self.format}), {', '.join(counts)}"]
        for name, part in self._parts().items():
            if name != "renamed":
                lines += [f"  {name} {tensor}: {why}" for tensor, why in part.items()]
        lines += [f"  assumed {line}" for line in self.assumed]
        lines += [f"  warning: {line}" for line in self.warnings]
        return "\n".join(lines)

    def _parts(self) -> dict[str, dict[str, str]]:
        return {"renamed": self.renamed, "resized": self.resized, "fresh": self.fresh, "ignored": self.ignored}
