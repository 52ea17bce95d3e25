"""From arguments to a `Request`: defaults < recipe < config file < arguments. Also reopens the settings of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitral.data.dataset import DatasetIndex, sample_headers
from vitral.data.decode import Header
from vitral.data.sources import open_dataset
from vitral.devices import choose_device
from vitral.errors import ConfigError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ViTConfig
from vitral.model.network import Network
from vitral.model.sizes import canonical_name, named_config
from vitral.runs import Run
from vitral.training.auto import HEADERS_SAMPLED, MAX_SMALL_SIDE, typical_side
from vitral.training.config import CUSTOM_MODEL, ResolvedConfig, TrainConfig, as_resolved
from vitral.training.events import Chosen
from vitral.training.settings import RESUME_TABLE, as_settings, flatten, read_toml, recipe_path, with_settings
from vitral.weights.pretrained import recommend

_LENGTHS = {"steps": None, "epochs": "auto", "minutes": None}
"""The settings that state the length of a run, with the value that leaves it to another."""


SETTINGS_OF_OLD_RUNS = {"near_duplicates": "ignore", "tune.views": 0, "refit": False, "parallel": "ddp"}
"""Values that reproduce runs of versions without these settings."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run that somebody asked for."""

    config: TrainConfig
    dataset: DatasetIndex | None = None
    """The dataset, if it had to be opened to choose the recipe."""
    headers: Sequence[Header] | None = None
    """Headers of some of its training images, if they were sampled for that."""
    choices: tuple[Chosen, ...] = ()
    network: Network | None = None
    """A network of the caller's own to train."""


def collect_settings(
    data: str | Path | None,
    settings: Mapping[str, Any],
    *,
    recipe: str | None = None,
    config: str | Path | None = None,
    origin: str = "train",
) -> Request:
    """Return the request for a new run.

    Without a recipe, a run from a checkpoint uses `finetune`, and a run from scratch `small` or `photos`, by the size
    of the images. The recipe "none" uses none.
    """
    settings = dict(settings)
    network = pop_network(settings)
    in_file = {} if config is None else read_toml(Path(config))
    _pop_resume_table(in_file)
    location = str(data) if data is not None else in_file.get("data") or settings.get("data")
    if not location:
        raise ConfigError("DATA is missing.", hint="Run: vitral train FOLDER, or vitral train builtin:digits")
    model = settings.get("model") or in_file.get("model")
    if network is None and model not in (None, "auto"):
        canonical_name(str(model))  # raises for a misspelled name, before the dataset is read
    choices, dataset, headers = (), None, None
    if recipe is None:
        recipe, reason, dataset, headers = _choose_recipe(str(location), [in_file, settings])
        choices = (Chosen(name="recipe", value=recipe, reason=reason),)
    collected = with_settings(None, {"data": location}, origin)
    if recipe not in ("", "none"):
        content = read_toml(recipe_path(recipe))
        if network is not None:  # it has its own architecture and dropout
            content = {name: value for name, value in content.items() if not name.startswith(("network.", "drop"))}
        elif model not in (None, "auto") and isinstance(named_config(str(model)), BiTConfig):
            content = {name: value for name, value in content.items() if not _is_vit_field(name)}
        if (settings.get("objective") or in_file.get("objective")) == "masked-patches":  # it has a loss of its own
            content = {name: value for name, value in content.items() if not name.startswith("loss.")}
        collected = add_layer(collected, content, f"the recipe {recipe}")
    collected = add_layer(collected, in_file, f"--config {config}")
    collected = add_layer(collected, {**settings, "data": location}, origin)
    if collected.from_weights == "auto":
        name, reason = recommend(choose_device(collected.device).value)
        collected = add_layer(collected, {"from": name}, origin)
        choices = (*choices, Chosen(name="from", value=name, reason=reason))
    return Request(config=collected, dataset=dataset, headers=headers, choices=choices, network=network)


def pop_network(settings: dict[str, Any]) -> Network | None:
    """Replace a network passed as `model` by a name that config.toml can hold, and return the network."""
    network = settings.get("model")
    if not isinstance(network, nn.Module):
        return None
    if not isinstance(getattr(network, "config", None), ViTConfig | BiTConfig):
        raise ConfigError(
            f"model={type(network).__name__} has no ViTConfig.", hint="Subclass vitral.ViT, or set its `config`."
        )
    settings["model"] = f"{CUSTOM_MODEL}{type(network).__name__}"
    return network  # pyright: ignore[reportReturnType]  # a network of the caller's own counts as one of ours


def _choose_recipe(
    data: str, layers: Sequence[Mapping[str, Any]]
) -> tuple[str, str, DatasetIndex | None, Sequence[Header] | None]:
    """Return the name of a recipe, the reason for it, and the dataset with its headers if they had to be read."""
    if any(layer.get(name) for layer in layers for name in ("from", "from_", "from_weights")):
        return "finetune", "training starts from a checkpoint", None, None
    objectives = [layer["objective"] for layer in layers if layer.get("objective")]
    dataset = open_dataset(data, labeled=objectives[-1:] != ["masked-patches"])
    headers = sample_headers(dataset.splits.get("train", ()), HEADERS_SAMPLED, required=True)
    side = typical_side(headers) if dataset.splits.get("train") else 0
    name = "small" if side <= MAX_SMALL_SIDE else "photos"
    return name, f"training from scratch on images of about {side} pixels", dataset, headers


def _is_vit_field(name: str) -> bool:
    section, _, field = name.partition(".")
    return section == "network" and field not in {item.name for item in fields(BiTConfig)}


def add_layer(config: TrainConfig, settings: Mapping[str, Any], origin: str) -> TrainConfig:
    """Return a config with one more layer of settings. The length that the latest layer states replaces the others."""
    stated = [name for name in _LENGTHS if settings.get(name) not in (None, "auto")]
    if len(stated) > 1:
        raise ConfigError(f"{origin}: {' and '.join(stated)} both set the length of the run.", hint="Pass one of them.")
    others = {name: value for name, value in _LENGTHS.items() if stated and name not in stated}
    return with_settings(with_settings(config, others, origin), settings, origin)


# ---- an existing run ----


def reopen(
    folder: Path,
    data: str | Path | None,
    settings: Mapping[str, Any],
    *,
    recipe: str | None = None,
    config: str | Path | None = None,
    out: str | Path | None = None,
) -> tuple[Run, ResolvedConfig]:
    """Return a run to resume and its settings. Settings may be repeated, but raise ConfigError if they differ.

    Only `parallel` may: every strategy reads the states of the others.
    """
    if recipe or config or (out is not None and not _is_same_path(out, folder)):
        raise ConfigError("--resume continues a run as it is.", hint="Drop --recipe, --config and --out.")
    run = Run.open(folder)
    resolved = read_run_settings(run)
    repeated = {**flatten(settings), **({"data": str(data)} if data else {})}
    repeated = {name: value for name, value in repeated.items() if value != "auto"}
    current, requested = as_settings(resolved), as_settings(with_settings(resolved, repeated, "--resume"))
    for name, value in requested.items():
        if name == "parallel" or current.get(name) == value:
            continue
        if not _are_equivalent(name, current.get(name), value):
            raise ConfigError(
                f"{run.folder} has {name}={current.get(name)!r}, but --resume got {value!r}.",
                hint="Leave it out, or start another run with another --out.",
            )
    return run, replace(resolved, parallel=requested["parallel"])


def read_run_settings(run: Run) -> ResolvedConfig:
    """Return the settings that a run started with; raise ConfigError if some are lost."""
    content = flatten(run.read_config())
    lengths = _pop_resume_table(content)
    config = with_settings(None, {**SETTINGS_OF_OLD_RUNS, **content, **lengths}, str(run.config))
    missing = [name for name, value in as_settings(config).items() if value == "auto"]
    if missing := [name for name in missing if name != "model" or config.from_weights is None]:
        raise ConfigError(
            f"{run.config} is damaged: {', '.join(missing)} should have a value.",
            hint="Restore the file, or start another run.",
        )
    return as_resolved(config)


def _pop_resume_table(content: dict[str, Any]) -> dict[str, Any]:
    """Remove the length in other units from the settings of a file, and return it."""
    names = {f"{RESUME_TABLE}.{name}": name for name in _LENGTHS}
    return {name: content.pop(dotted) for dotted, name in names.items() if dotted in content}


def _are_equivalent(name: str, first: object, second: object) -> bool:
    if not isinstance(first, str) or not isinstance(second, str):
        return False
    if name in ("data", "val", "from", "drop"):
        return _is_same_path(first, second)
    is_custom = first.startswith(CUSTOM_MODEL) or second.startswith(CUSTOM_MODEL)
    return name == "model" and not is_custom and canonical_name(first) == canonical_name(second)


def _is_same_path(first: str | Path, second: str | Path) -> bool:
    return Path(first).expanduser().resolve() == Path(second).expanduser().resolve()
