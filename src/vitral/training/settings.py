"""Where settings come from, each layer over the one before: defaults, the recipe, a file, what was said."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitral.data.dataset import DatasetIndex
from vitral.data.sources import open_dataset
from vitral.errors import ConfigError
from vitral.model.bit_config import BiTConfig
from vitral.model.sizes import canonical_name, named_config
from vitral.runs import Run
from vitral.training.auto import SMALL, typical_side
from vitral.training.config import AGAIN, TrainConfig, as_settings, read_toml, recipe_path, with_settings
from vitral.training.events import Chosen


class Request(NamedTuple):
    config: TrainConfig
    data: DatasetIndex | None
    """Where they had to be opened for it."""
    decided: tuple[Chosen, ...]


def collect_settings(
    data: str | Path | None,
    given: Mapping[str, Any],
    *,
    recipe: str | None = None,
    config: str | Path | None = None,
    origin: str = "train",
) -> Request:
    """The settings of a new run. Without a recipe, ``finetune`` is taken for a checkpoint, else ``small`` or ``photos``
    by the size of the pictures; "none" takes none."""
    in_file = {} if config is None else read_toml(Path(config))
    _take_again(in_file)
    place = str(data) if data is not None else in_file.get("data") or given.get("data")
    if not place:
        raise ConfigError("There is no data to train on.", hint="vitral train builtin:digits, or a folder of yours.")
    opened = None
    starts_from_weights = any(layer.get(name) for layer in (in_file, given) for name in ("from", "from_weights"))
    made: list[Chosen] = []
    if recipe is None and starts_from_weights:
        recipe, made = "finetune", [Chosen(name="recipe", value="finetune", reason="it starts from a checkpoint")]
    elif recipe is None:
        says = [layer["objective"] for layer in (in_file, given) if layer.get("objective")]
        opened = open_dataset(place, labelled=says[-1:] != ["masked-patches"])
        items = opened.splits.get("train", ())
        side = typical_side(items) if items else 0
        recipe = "small" if side <= SMALL else "photos"
        made = [Chosen(name="recipe", value=recipe, reason=f"from scratch, on pictures of about {side} pixels")]
    settled = with_settings(None, {"data": place}, origin)
    if recipe not in (None, "none"):
        path = recipe_path(recipe)
        content = read_toml(path)
        if (model := given.get("model") or in_file.get("model")) and is_bit(str(model)):
            content = {name: value for name, value in content.items() if not _is_of_a_vit(name)}
        settled = over(settled, content, f"the recipe {path.name}")
    settled = over(settled, in_file, f"--config {config}")
    return Request(over(settled, {**given, "data": place}, origin), opened, tuple(made))


def is_bit(model: str) -> bool:
    try:
        return isinstance(named_config(model), BiTConfig)
    except ConfigError:  # told where the network is built
        return False


def _is_of_a_vit(name: str) -> bool:
    section, _, field = name.partition(".")
    return section == "network" and field not in BiTConfig.__dataclass_fields__


def over(settled: TrainConfig, settings: Mapping[str, Any], origin: str) -> TrainConfig:
    """One layer over those before; how long a run takes is said in one way, so the latest way counts."""
    asked = [name for name in _LENGTHS if settings.get(name) not in (None, "auto")]
    if len(asked) > 1:
        raise ConfigError(f"{origin}: {' and '.join(asked)} both say how long to train.", hint="Give one of them.")
    others = {name: value for name, value in _LENGTHS.items() if asked and name not in asked}
    return with_settings(with_settings(settled, others, origin), settings, origin)


def flatten(settings: dict[str, Any]) -> dict[str, Any]:
    """optim=dict(lr=1) -> optim.lr: 1; a dict inside a section, as network.stem, is a value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        is_section = isinstance(value, dict) and "." not in name
        found |= {f"{name}.{part}": inner for part, inner in value.items()} if is_section else {name: value}
    return found


def reopen(
    folder: Path,
    data: str | Path | None,
    settings: dict[str, Any],
    *,
    recipe: str | None = None,
    config: str | Path | None = None,
    out: str | Path | None = None,
) -> tuple[Run, TrainConfig]:
    """A run that is gone on with, and its settings; what is said again must be the same."""
    if recipe or config or (out is not None and not _same_path(out, folder)):
        raise ConfigError("--resume goes on with a run as it is.", hint="Leave --recipe, --config and --out out.")
    run = Run.open(folder)
    own = read_run_settings(run)
    said = {**flatten(settings), **({"data": str(data)} if data else {})}
    said = {name: value for name, value in said.items() if value != "auto"}  # as good as not said
    known, asked = as_settings(own), as_settings(with_settings(own, said, "--resume"))
    for name, value in asked.items():
        if known.get(name) != value and not _means_the_same(name, known.get(name), value):
            raise ConfigError(
                f"{name} is {known.get(name)!r} in {run.folder}, and {value!r} now.",
                hint="A resumed run keeps its settings; leave it out, or start another run.",
            )
    return run, own


def read_run_settings(run: Run) -> TrainConfig:
    """What a run began with; ConfigError where that is not all there any more."""
    content = read_toml(run.config)
    again = _take_again(content)
    config = with_settings(None, {**content, **again}, str(run.config))
    left = [name for name, value in as_settings(config).items() if value == "auto"]
    if left := [name for name in left if name != "model" or config.from_weights is None]:  # a checkpoint brings it
        raise ConfigError(
            f"{run.config} is damaged: a run settles {', '.join(left)} when it begins, and here nothing is said.",
            hint="Bring the file back as it was, or start another run.",
        )
    return config


def _take_again(content: dict[str, Any]) -> dict[str, Any]:
    """Takes the length in other words, which as_toml writes for a resume, out of the content of a file."""
    again = content.get(AGAIN)
    return content.pop(AGAIN) if isinstance(again, dict) and set(again) <= set(_LENGTHS) else {}


def _means_the_same(name: str, first: Any, second: Any) -> bool:
    if not isinstance(first, str) or not isinstance(second, str):
        return False
    if name in ("data", "val", "from"):
        return _same_path(first, second)
    return name == "model" and canonical_name(first) == canonical_name(second)


def _same_path(first: str | Path, second: str | Path) -> bool:
    return Path(first).expanduser().resolve() == Path(second).expanduser().resolve()


_LENGTHS = {"steps": None, "epochs": "auto", "minutes": None}
