"""Content: what is to be written, for the dialects that write."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitral.errors import WeightsError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.vit import ViT
from vitral.preprocess import Preprocess
from vitral.weights.dialects.rules import Rule

PLAIN: dict[str, tuple[Any, ...]] = dict(registers=(0,), layer_scale=(None,), norm_after_pool=(False,))
"""For ``check_holds``: none of what only timm and its relatives have a place for."""


@dataclass(frozen=True, kw_only=True)
class Content:
    dialect: str
    network: ViTConfig | BiTConfig
    state: Mapping[str, Tensor]
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    multi_label: bool = False
    provenance: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    """What was guessed when it was loaded, and is passed on as such."""

    @property
    def config(self) -> ViTConfig:
        """Of a ViT, which is all that most dialects hold."""
        if isinstance(self.network, BiTConfig):
            raise WeightsError(
                f"The {self.dialect} layout holds ViTs, and this is a BiT.",
                hint="Use the bit dialect or our own format.",
            )
        return self.network

    def with_learned_positions(self) -> "Content":
        """The same network with its positions as one table, for dialects that know no other kind.

        Fixed waves and row and column tables come out as the table that they make, no positions as zeros."""
        config = self.config
        if config.position == "learned" and config.position_at == "stem":
            return self
        if config.position == "relative" or config.position_at != "stem":
            seen = f"position={config.position!r}, position_at={config.position_at!r}"
            raise self._refusal(f"{seen}; it has one table, added at the stem")
        state = {name: tensor for name, tensor in self.state.items() if not name.startswith("positions.")}
        state["positions.0.table"] = _table(config, self.state)
        return replace(self, network=replace(config, position="learned"), state=state)

    def check_holds(self, **holds: tuple[Any, ...]) -> None:
        """Refuses what the dialect has no place for; ``holds`` gives the values it can hold of each field."""
        for name, allowed in holds.items():
            value = self.config.has_class_token if name == "class_token" else getattr(self.config, name)
            if value not in allowed:
                choices = " or ".join(repr(choice) for choice in allowed)
                raise self._refusal(f"{name}={value!r}; it has {choices}")

    def _refusal(self, seen: str) -> WeightsError:
        message = f"The {self.dialect} layout cannot hold {seen}."
        return WeightsError(message, hint="Our own format holds everything.")

    def renamed(self, rules: Iterable[Rule]) -> dict[str, Tensor]:
        theirs: dict[str, Tensor] = {}
        for rule in rules:
            tensors = rule.write(tuple(self.state[name].detach().cpu() for name in rule.ours))
            theirs |= {name: tensor.contiguous() for name, tensor in zip(rule.theirs, tensors, strict=True)}
        return theirs


def _table(config: ViTConfig, state: Mapping[str, Tensor]) -> Tensor:
    if config.position == "none":
        rows, columns = config.table_grid
        return torch.zeros(config.has_class_token + rows * columns, config.width)
    with torch.device("meta"):
        positions = ViT(config).positions
    positions.load_state_dict(
        {name.removeprefix("positions."): value for name, value in state.items() if name.startswith("positions.")},
        assign=True,
    )
    like = next(iter(state.values())).new_empty(0)
    first = positions[0]
    return torch.cat([first.class_rows(like), first.patch_rows(like)])  # type: ignore[operator]
