"""Every setting of a training run. The same names serve in Python, in TOML and on the command line (``--optim.lr``).

``"auto"`` is decided in decide.py, with a reason. The text under a field is its help wherever it appears.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from vitral.data.augment import Augment
from vitral.devices import device_name
from vitral.errors import ConfigError, did_you_mean
from vitral.model.config import field_from_word
from vitral.training.bounds import check_numbers
from vitral.training.kinds import in_kind
from vitral.training.masking import Masking

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """How weights move."""

    name: Literal["sgd", "adam", "adamw", "muon"] = "adamw"
    """sgd, adam, adamw, or muon: orthogonalised momentum for the matrices of the blocks, AdamW for the rest."""
    lr: float | Auto = "auto"
    """Learning rate at its peak."""
    weight_decay: float = 0.05
    """Decoupled, times the learning rate; on matrices only."""
    momentum: float = 0.9
    """For sgd."""
    betas: tuple[float, float] = (0.9, 0.999)
    """For adam and adamw."""
    eps: float = 1e-8
    """For adam and adamw."""
    clip: float = 1.0
    """Largest norm of all gradients together; 0: no limit."""
    layer_decay: float | Auto = "auto"
    """Each layer below the head learns at this times the rate of the one above it; auto: 0.75 where all weights of a
    checkpoint are trained, else 1."""
    schedule: Literal["cosine", "linear", "rsqrt", "stair", "constant"] = "cosine"
    """How the learning rate goes on after the warm-up."""
    stairs: tuple[float, float, float] = (0.3, 0.6, 0.9)
    """For stair: the parts of all steps after which it falls to a tenth."""
    warmup_steps: int | Auto = "auto"
    """Steps in which it rises from 0; auto: 5 % of all."""
    end_lr: float = 0.0
    """Where cosine and linear end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What is made small."""

    kind: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: one class; sigmoid: every class by itself, as for multi-label data."""
    smoothing: float = 0.0
    """Label smoothing."""
    class_weights: Literal["none", "balanced"] | Auto = "auto"
    """balanced: rare classes count more (of the sigmoid loss: their yes); auto: when one class is over three times as
    common as another, and a picture has one label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Pictures mixed within a batch."""

    mixup: float = 0.0
    """Alpha of mixup; 0: off."""
    cutmix: float = 0.0
    """Alpha of CutMix; 0: off. With both, each batch takes one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tune:
    """Which weights are trained."""

    what: Literal["all", "head", "last-blocks", "lora"] | Auto = "auto"
    """all; only the head; the head and the last blocks; or LoRA: small additions to the matrices of the blocks."""
    blocks: int = 2
    """For last-blocks: how many."""
    rank: int = 8
    """For lora: its rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A training run."""

    data: str
    """A folder of class folders, a table, tar shards, hf:owner/name, or builtin:digits."""
    val: str | None = None
    """Other data to hold out, instead of a split of these."""
    val_fraction: float = 0.1
    """The part of the training pictures that chooses the best epoch, where the data bring no val split."""
    model: str = "auto"
    """A name such as vit-s16, for training from scratch."""
    from_weights: str | None = None
    """A checkpoint to start from."""
    objective: Literal["classify", "masked-patches"] = "classify"
    """classify: learn from labels; masked-patches: from pictures alone, by filling in what was hidden (B.1.2)."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ViTConfig to change."""
    image_size: int | tuple[int, int] | Auto = "auto"
    """Pixels, or height and width."""
    channels: int | Auto = "auto"
    """3: RGB, 1: grey, or the bands of the pictures."""
    resize: Literal["squash", "crop", "pad", "native"] | Auto = "auto"
    """How pictures get to the size; auto: crop for photos, squash for small pictures, or what the checkpoint has."""
    epochs: float | Auto = "auto"
    """Times that every picture is seen."""
    steps: int | None = None
    """Steps of the optimizer, instead of epochs."""
    minutes: float | None = None
    """Plan the epochs to fit into this time, by the speed of the first steps."""
    batch_size: int | Auto = "auto"
    """Pictures in one step of the optimizer."""
    accumulate: int = 1
    """Micro-batches that a step is made of, to save memory."""
    optim: Optim = field(default_factory=Optim)
    loss: Loss = field(default_factory=Loss)
    augment: Augment = field(default_factory=Augment)
    mix: Mix = field(default_factory=Mix)
    tune: Tune = field(default_factory=Tune)
    masking: Masking = field(default_factory=Masking)
    ema: float = 0.0
    """Decay of an average of the weights, which is then evaluated and kept; 0: off."""
    dropout: float = 0.0
    """Chance that a value inside the network is left out of a step."""
    drop_path: float = 0.0
    """Stochastic depth."""
    seed: int = 0
    """Of everything random; another seed is another run."""
    workers: int | Auto = "auto"
    """Processes that load pictures."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or mps; auto: the fastest that is there."""
    precision: Literal["float32", "bfloat16", "float16"] | Auto = "auto"
    """Of the products inside the network; the weights stay float32. auto: bfloat16 where the hardware has it."""
    compile: bool = False
    """Compile the network: slow to start, then faster."""
    gradient_checkpointing: bool = False
    """Less memory for a third more time."""
    keep: Literal["best", "last"] = "best"
    """best: the model of the best epoch, by the validation; last: that of the last step."""
    patience: int = 0
    """Stop when so many epochs brought nothing better; 0: never."""
    save_seconds: float = 30.0
    """Least time between saved states, besides every epoch that is kept; more where a state takes long to write."""
    most_bad: float = 0.01
    """The largest part of pictures that may be unreadable."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_name(self.device))
        _check_words(self)
        _check_network(self.network)
        check_numbers(as_settings(self))
        if isinstance(self.batch_size, int) and self.batch_size % self.accumulate:
            raise ConfigError(f"batch_size={self.batch_size} is no multiple of accumulate={self.accumulate}.")
        if self.keep == "last" and self.patience:
            raise ConfigError(
                "patience waits for a better epoch, and keep='last' takes the last one.", hint="Leave one out."
            )

    @property
    def changes_pictures(self) -> bool:
        """Whether training sees other pictures or labels than evaluation."""
        how = self.augment
        off = (
            how.crop == "none",
            not how.randaugment,
            not self.mix.mixup,
            not self.mix.cutmix,
            not self.loss.smoothing,
        )
        amounts = (how.flip, how.rotate, how.shear, how.zoom, how.shift, how.jitter, how.erase)
        return any(amounts) or not all(off)


def _check_words(config: TrainConfig) -> None:
    for name in ("data", "val", "from_weights", "model"):
        value = getattr(config, name)
        seen = f"{_SPELLED.get(name, name)}={value!r}"
        if value is not None and name != "data" and not value.strip():  # collect_settings says what data are
            raise ConfigError(f"{seen} names nothing.", hint="Leave it out.")
        if value is not None and ("\0" in value or value.encode("utf-8", "replace").decode() != value):
            raise ConfigError(f"{seen} is no text in UTF-8, which config.toml is written in.", hint="Rename it.")
    if config.from_weights and config.model != "auto":
        raise ConfigError(
            f"model={config.model!r} and from={config.from_weights!r} both say which network.",
            hint="Leave --model out: the checkpoint brings its own.",
        )


def _check_network(network: Mapping[str, Any]) -> None:
    if "num_classes" in network:
        raise ConfigError(
            f"network.num_classes={network['num_classes']!r}: the number of classes is that of the data.",
            hint="Leave it out.",
        )
    for name in ("image_size", "channels", "dropout", "drop_path"):
        if name in network:
            raise ConfigError(
                f"network.{name}={network[name]!r}: a run has a setting of its own for it.", hint=f"Use {name}."
            )


# ---- from and to words ----

SECTIONS = {"optim": Optim, "loss": Loss, "augment": Augment, "mix": Mix, "tune": Tune, "masking": Masking}
_SPELLED = {"from_weights": "from"}  # a word that Python keeps for itself


def setting_names() -> dict[str, Any]:
    """Every setting by its dotted name, with its type."""
    names: dict[str, Any] = {}
    hints = get_type_hints(TrainConfig)
    for one in fields(TrainConfig):
        if one.name in SECTIONS:
            inner = get_type_hints(SECTIONS[one.name])
            names |= {f"{one.name}.{part.name}": inner[part.name] for part in fields(SECTIONS[one.name])}
        else:
            names[_SPELLED.get(one.name, one.name)] = hints[one.name]
    return names


def with_settings(config: TrainConfig | None, settings: Mapping[str, Any], origin: str) -> TrainConfig:
    """A config with dotted settings changed; ``origin`` says where they come from, for the error."""
    known = setting_names()
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for word, value in settings.items():
        name = _SPELLED.get(word, word)  # from_weights=... in Python, where from is a keyword
        section, dot, rest = name.partition(".")
        if section == "network" and dot:
            inner.setdefault("network", {})[rest] = field_from_word(rest, value) if isinstance(value, str) else value
            continue
        if name not in known:
            inside = [setting for setting in known if setting.endswith(f".{name}")]
            hint = f"Did you mean {' or '.join(inside)}?" if inside else did_you_mean(name, known)
            hint = f"{name} is a section, such as {name}.{_first_of(name)}." if name in SECTIONS else hint
            hint = hint or "`vitral train --help-all` lists them."
            raise ConfigError(f"{origin}: there is no setting {name!r}.", hint=hint)
        value = in_kind(name, value, known[name], origin)
        if dot:
            inner.setdefault(section, {})[rest] = value
        else:
            changes[{"from": "from_weights"}.get(name, name)] = value
    for section, parts in inner.items():
        if section == "network":
            before = dict(config.network) if config else {}
            changes["network"] = {**before, **parts}
        else:
            before = getattr(config, section) if config else SECTIONS[section]()
            changes[section] = replace(before, **parts)
    if config is None and "data" not in changes:
        raise ConfigError(f"{origin}: there is no setting data, which says what to train on.")
    return replace(config, **changes) if config else TrainConfig(**changes)


def _first_of(section: str) -> str:
    return fields(SECTIONS[section])[0].name


def read_toml(path: Path) -> dict[str, Any]:
    """Dotted settings of a file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits, and of deep nesting
        raise ConfigError(f"{path} is no valid TOML: {error}.") from error
    return dict(_flat(content))


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and (name in SECTIONS or name == "network"):
            yield from ((f"{name}.{part}", inner) for part, inner in value.items())
        else:
            yield name, value


def recipe_path(name: str) -> Path:
    """A recipe by its name, or the path of one."""
    if name.endswith(".toml") and Path(name).is_file():
        return Path(name)
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if (folder / f"{name.removesuffix('.toml')}.toml").is_file():
            return folder / f"{name.removesuffix('.toml')}.toml"
    known = recipe_names()
    raise ConfigError(
        f"There is no recipe {name!r}.", hint=did_you_mean(name, known) or f"There are: {', '.join(known)}."
    )


def recipe_names() -> list[str]:
    package = Path(__file__).parents[1]
    found = {
        path.stem for folder in (package / "recipes", package.parents[1] / "recipes") for path in folder.glob("*.toml")
    }
    return sorted(found)


def as_settings(config: TrainConfig) -> dict[str, Any]:
    """Every setting by its dotted name."""
    settings: dict[str, Any] = {}
    for one in fields(config):
        value = getattr(config, one.name)
        if one.name == "network":
            settings |= {f"network.{name}": part for name, part in value.items()}
        elif is_dataclass(value) and not isinstance(value, type):
            settings |= {f"{one.name}.{name}": part for name, part in asdict(value).items()}
        else:
            settings[_SPELLED.get(one.name, one.name)] = value
    return settings


def as_toml(config: TrainConfig, comments: bool = True) -> str:
    """The config as a file, with the text under each field as a comment."""
    texts = field_texts()
    lines: list[str] = []
    section = ""
    settings = as_settings(config)
    again = _said_twice(config)
    settings |= dict.fromkeys(again)
    for name, value in sorted(settings.items(), key=lambda pair: "." in pair[0]):
        head, dot, rest = name.partition(".")
        if dot and head != section:
            section = head
            lines += ["", f"[{section}]"]
        if comments and (text := texts.get(name)):
            lines.append(f"# {text}")
        value = "none" if value is None and head == "network" else value
        lines.append(f"{_key(rest or head)} = {_toml(value)}" if value is not None else f"# {rest or head} = (not set)")
    if again:
        lines += ["", f"[{AGAIN}]", "# How long the run is in other words, which only --resume reads."]
        lines += [f"{name} = {_toml(value)}" for name, value in again.items()]
    return "\n".join(lines) + "\n"


AGAIN = "resume"


def _said_twice(config: TrainConfig) -> dict[str, Any]:
    """A settled run has its length in two ways, and a file from which a new one can start has one of them: the steps
    that were asked for, or the epochs that were planned for the minutes."""
    if config.epochs == "auto":
        return {}
    found: dict[str, Any] = {} if config.steps is None else {"epochs": config.epochs}
    return found if config.minutes is None else {**found, "minutes": config.minutes}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_toml(part)}" for name, part in value.items()) + "}"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's escapes are JSON's


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)


def field_texts() -> dict[str, str]:
    """The text under each field, by its dotted name."""
    import ast
    import inspect

    texts: dict[str, str] = {}
    for prefix, kind in {"": TrainConfig, **{f"{name}.": kind for name, kind in SECTIONS.items()}}.items():
        tree = ast.parse(inspect.getsource(kind)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for one, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr):
                name = _SPELLED.get(one.target.id, one.target.id)
                texts[prefix + name] = " ".join(str(ast.literal_eval(after.value)).split())
    return texts
