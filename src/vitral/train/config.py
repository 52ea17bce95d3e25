"""Every setting of a training run. The same names serve in Python, in TOML and on the command line (``--optim.lr``).

``"auto"`` is decided in decide.py, with a reason. The text under a field is its help wherever it appears.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vitral.data.augment import Augment
from vitral.errors import ConfigError, did_you_mean
from vitral.model.config import field_from_word

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
    schedule: Literal["cosine", "linear", "rsqrt", "constant"] = "cosine"
    """How the learning rate goes on after the warm-up."""
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
    """balanced: rare classes count more; auto: when one class is over three times as common as another."""


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
    selection: float = 0.1
    """The part of the training pictures that chooses the best epoch, where the data bring no val split."""
    model: str = "auto"
    """A name such as vit-s16, for training from scratch."""
    from_weights: str | None = None
    """A checkpoint to start from."""
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
    """Steps of the optimiser, instead of epochs."""
    minutes: float | None = None
    """Plan the epochs to fit into this time, by the speed of the first steps."""
    batch_size: int | Auto = "auto"
    """Pictures in one step of the optimiser."""
    accumulate: int = 1
    """Micro-batches that a step is made of, to save memory."""
    optim: Optim = field(default_factory=Optim)
    loss: Loss = field(default_factory=Loss)
    augment: Augment = field(default_factory=Augment)
    mix: Mix = field(default_factory=Mix)
    tune: Tune = field(default_factory=Tune)
    ema: float = 0.0
    """Decay of an average of the weights, which is then evaluated and kept; 0: off."""
    dropout: float = 0.0
    drop_path: float = 0.0
    """Stochastic depth."""
    seed: int = 0
    workers: int | Auto = "auto"
    """Processes that load pictures."""
    device: str = "auto"
    precision: Literal["float32", "bfloat16", "float16"] | Auto = "auto"
    compile: bool = False
    """Compile the network: slow to start, then faster."""
    gradient_checkpointing: bool = False
    """Less memory for a third more time."""
    patience: int = 0
    """Stop when so many epochs brought nothing better; 0: never."""
    save_seconds: float = 30.0
    """Time between saved states, besides every epoch."""
    most_bad: float = 0.01
    """The largest part of pictures that may be unreadable."""

    def __post_init__(self) -> None:
        _check_numbers(self)

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


def _check_numbers(config: TrainConfig) -> None:
    least: dict[str, float] = {
        "epochs": 0,
        "steps": 1,
        "minutes": 0.01,
        "batch_size": 1,
        "accumulate": 1,
        "workers": 0,
        "channels": 1,
    }
    for name, bound in least.items():
        value = getattr(config, name)
        if isinstance(value, int | float) and value < bound:
            raise ConfigError(f"{name}={value} must be at least {bound:g}.")
    if not 0 < config.selection < 1:
        raise ConfigError(f"selection={config.selection} must be above 0 and below 1.")
    for name in ("ema", "dropout", "drop_path"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least 0 and below 1.")
    if config.from_weights and config.model != "auto":
        raise ConfigError(
            f"model={config.model!r} and from={config.from_weights!r} both say which network.",
            hint="Leave --model out: the checkpoint brings its own.",
        )
    optim = config.optim
    if isinstance(optim.lr, float | int) and not optim.lr > 0:
        raise ConfigError(f"optim.lr={optim.lr} must be above 0.")
    if optim.layer_decay != "auto" and not 0 < optim.layer_decay <= 1:
        raise ConfigError(f"optim.layer_decay={optim.layer_decay} must be above 0 and at most 1.")
    if isinstance(config.batch_size, int) and config.batch_size % config.accumulate:
        raise ConfigError(f"batch_size={config.batch_size} is no multiple of accumulate={config.accumulate}.")


# ---- from and to words ----

SECTIONS = {"optim": Optim, "loss": Loss, "augment": Augment, "mix": Mix, "tune": Tune}
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
            inner.setdefault("network", {})[rest] = field_from_word(value) if isinstance(value, str) else value
            continue
        if name not in known:
            inside = [setting for setting in known if setting.endswith(f".{name}")]
            hint = f"Did you mean {' or '.join(inside)}?" if inside else did_you_mean(name, known)
            hint = hint or "`vitral train --help-all` lists them."
            raise ConfigError(f"{origin}: there is no setting {name!r}.", hint=hint)
        value = _checked(name, value, known[name], origin)
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
    try:
        return replace(config, **changes) if config else TrainConfig(**changes)
    except TypeError as error:
        raise ConfigError(f"{origin}: {error}.") from error


def _checked(name: str, value: Any, kind: Any, origin: str) -> Any:
    """The value in the type of its field; words from a command line are read as numbers where one is wanted."""
    for choice in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        found = _as_kind(value, choice)
        if found is not _NO:
            return found
    raise ConfigError(f"{origin}: {name}={value!r} must be {_allowed(kind)}.")


_NO = object()


def _as_kind(value: Any, kind: Any) -> Any:
    if kind is type(None):
        return None if value in (None, "none") else _NO
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else _NO
    if get_origin(kind) is tuple:
        return _as_pair(value, get_args(kind)[0])
    if kind is bool:
        return (
            {"true": True, "false": False, True: True, False: False}.get(value, _NO)
            if isinstance(value, bool | str)
            else _NO
        )
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
            return _NO if kind is int and number != int(number) else kind(number)
        except (TypeError, ValueError, OverflowError):
            return _NO
    if kind is str:
        return value if isinstance(value, str) else _NO
    return value if isinstance(value, Mapping) else _NO


def _as_pair(value: Any, kind: type) -> Any:
    parts = value.replace("x", ",").split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        return _NO
    pair = tuple(_as_kind(part, kind) for part in parts)
    return _NO if _NO in pair else pair


def _allowed(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_allowed(part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return ", ".join(repr(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return "two numbers"
    return {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}.get(kind, "nothing")


def read_toml(path: Path) -> dict[str, Any]:
    """Dotted settings of a file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
    for name, value in sorted(as_settings(config).items(), key=lambda pair: "." in pair[0]):
        head, dot, rest = name.partition(".")
        if dot and head != section:
            section = head
            lines += ["", f"[{section}]"]
        if comments and (text := texts.get(name)):
            lines.append(f"# {text}")
        lines.append(f"{rest or head} = {_toml(value)}" if value is not None else f"# {rest or head} = (not set)")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items()) + "}"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


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
