"""Content: the model that a dialect writes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitral.errors import WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.dialects.rules import Rule

PLAIN: dict[str, tuple[Any, ...]] = dict(registers=(0,), layer_scale=(None,), norm_after_pool=(False,))
"""Values for ``check_supported`` of a dialect without the extras of timm."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """A model and everything that a file may store with it."""

    dialect: str
    network: ViTConfig | BiTConfig
    state: Mapping[str, Tensor]
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    multi_label: bool = False
    position_table: Tensor | None = None
    """The table that fixed or factorized positions amount to, for dialects with learned tables only."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    """Assumptions made when the model was loaded, which the next reader inherits."""

    @property
    def config(self) -> ViTConfig:
        """Return the config of a ViT, or raise WeightsError for a BiT."""
        if isinstance(self.network, BiTConfig):
            raise WeightsError(
                f"The {self.dialect} dialect stores ViTs, and this model is a BiT.",
                hint="Use dialect='bit' or dialect='native'.",
            )
        return self.network

    def with_learned_positions(self) -> "Content":
        """Return the same network with its positions as one learned table, for dialects without other kinds.

        Fixed waves and row and column tables become the table that they amount to, missing positions become zeros.
        """
        config = self.config
        if config.position == "learned" and config.position_at == "stem":
            return self
        if config.position == "relative" or config.position_at != "stem":
            value = f"position={config.position!r}, position_at={config.position_at!r}"
            raise self._unsupported(f"{value} (expected one table, added at the stem)")
        state = {name: tensor for name, tensor in self.state.items() if not name.startswith("positions.")}
        rows, columns = config.table_grid
        table = torch.zeros(config.has_class_token + rows * columns, config.width)
        state["positions.0.table"] = table if self.position_table is None else self.position_table
        return replace(self, network=replace(config, position="learned"), state=state)

    def check_supported(self, **supported: tuple[Any, ...]) -> None:
        """Raise WeightsError if a config field has a value that the dialect cannot store."""
        for name, allowed in supported.items():
            value = self.config.has_class_token if name == "class_token" else getattr(self.config, name)
            if value not in allowed:
                choices = " or ".join(repr(choice) for choice in allowed)
                raise self._unsupported(f"{name}={value!r} (expected {choices})")

    def _unsupported(self, value: str) -> WeightsError:
        return WeightsError(f"The {self.dialect} dialect cannot store {value}.", hint="Use dialect='native'.")

    def renamed(self, rules: Iterable[Rule]) -> dict[str, Tensor]:
        """Return the tensors under the names of the dialect."""
        theirs: dict[str, Tensor] = {}
        for rule in rules:
            tensors = rule.write(tuple(self.state[name].detach().cpu() for name in rule.ours))
            theirs |= {name: tensor.contiguous() for name, tensor in zip(rule.theirs, tensors, strict=True)}
        return theirs
