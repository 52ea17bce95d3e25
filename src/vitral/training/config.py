"""Every setting of a training run, as requested (`TrainConfig`) and as resolved (`ResolvedConfig`).

A setting has the same name in Python, in TOML and on the command line (`--optim.lr`). The text under a field is its
help, its comment in config.toml and its documentation. `auto.py` chooses a value for every "auto".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal, cast, get_args

from vitral.data.augment import Augment
from vitral.devices import normalize_device
from vitral.errors import ConfigError, check_choice, check_int, check_number
from vitral.preprocess import Resize

Auto = Literal["auto"]
Precision = Literal["float32", "bfloat16", "float16"]
TuneWhat = Literal["probe", "head", "last-blocks", "lora", "all"]
LossKind = Literal["softmax", "sigmoid"]
ClassWeights = Literal["none", "balanced"]
Parallel = Literal["ddp", "fsdp"]
MaskingTarget = Literal["mean-color", "small-patch", "pixels"]
CUSTOM_MODEL = "custom:"
"""Prefix of `model` for a network that the caller built; the class name follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """The optimizer and the learning-rate schedule."""

    name: Literal["sgd", "adamw", "muon"] = "adamw"
    """sgd, adamw, or muon: orthogonalized momentum for the matrices of the blocks, AdamW for everything else."""
    lr: float | Auto = "auto"
    """Peak learning rate."""
    weight_decay: float = 0.05
    """Decoupled weight decay, multiplied by the learning rate; applies to matrices only."""
    momentum: float | None = None
    """Momentum of sgd (default 0.9) or muon (default 0.95)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    eps: float = 1e-8
    """Epsilon of AdamW."""
    clip: float = 1.0
    """Maximum norm of the gradients; 0 turns clipping off."""
    layer_decay: float | Auto = "auto"
    """Factor of the learning rate from each layer to the one below it. auto: 0.75 if all weights of a checkpoint are
    trained, otherwise 1."""
    schedule: Literal["cosine", "linear", "rsqrt", "stair", "constant"] = "cosine"
    """Shape of the learning rate after the warmup."""
    stairs: tuple[float, float, float] = (0.3, 0.6, 0.9)
    """For stair: the fractions of all steps at which the learning rate drops to a tenth."""
    warmup_steps: int | Auto = "auto"
    """Steps of linear warmup from 0. auto: 5% of all steps."""
    end_lr: float = 0.0
    """Learning rate at the end of cosine and linear."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The classification loss."""

    kind: LossKind | Auto = "auto"
    """softmax: one class per image. sigmoid: an independent decision per class. auto: sigmoid for multi-label data."""
    smoothing: float = 0.0
    """Label smoothing."""
    class_weights: ClassWeights | Auto = "auto"
    """balanced: weight rare classes more (with sigmoid: their positives). auto: balanced if one class has more than
    three times the images of another and images have one label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Mixing images within a batch."""

    mixup: float = 0.0
    """Alpha of mixup; 0 turns it off."""
    cutmix: float = 0.0
    """Alpha of CutMix; 0 turns it off. With both, each batch uses one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tune:
    """The choice of the weights to train."""

    what: TuneWhat | Auto = "auto"
    """probe: nothing after the linear probe. head: the head alone. last-blocks: the head and the last blocks. lora:
    low-rank updates of the matrices in the blocks. all: every weight."""
    probe: bool = True
    """Start from a linear probe: a head fitted to frozen features. false: start from zeros, as in the paper."""
    blocks: int | Auto = "auto"
    """Number of blocks that last-blocks trains. auto: a third of them."""
    rank: int = 8
    """Rank of the updates of lora."""
    views: int | Auto = "auto"
    """Views per image (plain, mirrored, then augmented) whose tokens last-blocks computes once after a probe. Training
    then runs the upper blocks alone. 0: augment and run all blocks at every step."""
    dropped: float = 2 / 3
    """Fraction of the patches that a step on cached tokens leaves out of each image. At least 48 are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masking:
    """Masked patch prediction (appendix B.1.2), with the paper's values as defaults; for objective masked-patches."""

    target: MaskingTarget = "mean-color"
    """mean-color: predict the mean color of a patch, 3 bits per channel. small-patch: the same for each of its 4 x 4
    cells. pixels: regress all of its pixels."""
    ratio: float = 0.5
    """Fraction of the patches whose embedding is corrupted."""
    masked: float = 0.8
    """Fraction of the corrupted patches that get the mask embedding."""
    swapped: float = 0.1
    """Fraction of the corrupted patches that get the embedding of another patch; the rest keep their own."""

    def __post_init__(self) -> None:
        check_choice("masking.target", self.target, get_args(MaskingTarget))
        check_number("masking.ratio", self.ratio, above=0, maximum=1)
        for name in ("masked", "swapped"):
            check_number(f"masking.{name}", getattr(self, name), minimum=0, maximum=1)
        if self.masked + self.swapped > 1 + 1e-9:
            raise ConfigError(
                f"masking.masked and masking.swapped add up to more than 1 (got {self.masked} and {self.swapped})."
            )

    def corrupted_patches(self, patches: int) -> int:
        """Return how many of `patches` are corrupted, the same number in every image."""
        return max(1, round(self.ratio * patches))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The settings of a training run, as requested."""

    data: str
    """A folder of class folders, a table, tar shards, hf:OWNER/NAME, or builtin:digits."""
    val: str | None = None
    """Another dataset to use as the test split."""
    val_fraction: float = 0.1
    """Fraction of the training images that forms the validation split, when the dataset has none."""
    group_by: str | None = None
    """Keep images of one group in one split. Name a column of the table, or write a regular expression for the names of
    the images; its first parenthesis is the name of the group."""
    near_duplicates: Literal["auto", "group", "ignore"] = "auto"
    """group: find near-duplicates by the features of the checkpoint and keep them in one split. ignore: do not search.
    auto: group if there are at most 10,000 images, and time."""
    drop: str | None = None
    """CSV file with the names of images to leave out of the train and validation splits."""
    model: str = "auto"
    """Name of a network to train from scratch, such as vit-s16."""
    from_weights: str | None = None
    """MODEL to start from: a run folder, a weights file, a name such as dinov2-s14, or hf:OWNER/NAME. auto: choose a
    pretrained one for the device."""
    objective: Literal["classify", "masked-patches"] = "classify"
    """classify: learn from labels. masked-patches: learn from images alone, by predicting hidden patches (B.1.2)."""
    network: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of ViTConfig to change."""
    image_size: int | tuple[int, int] | Auto = "auto"
    """Input size in pixels: one number, or height and width."""
    channels: int | Auto = "auto"
    """Input channels: 3 for RGB, 1 for gray, or the number of channels in the files."""
    resize: Resize | Auto = "auto"
    """How images are resized: crop, squash, pad or native. auto: as the checkpoint does. Without one, crop photos and
    squash small images."""
    epochs: float | Auto = "auto"
    """Number of passes over the training images."""
    steps: int | None = None
    """Number of optimizer steps, instead of epochs."""
    minutes: float | None = None
    """Time limit of the whole command. vitral measures its speed, chooses what fits, and shortens the schedule if the
    machine slows down."""
    batch_size: int | Auto = "auto"
    """Images per optimizer step, over all processes."""
    accumulate: int = 1
    """Number of micro-batches per step, over all processes; more need less memory."""
    parallel: Parallel | Auto = "auto"
    """How several processes share the work. ddp: each holds the whole model; fsdp: each holds a part of all weights,
    gradients and moments (FSDP2). auto: ddp, unless the model does not fit the memory of a device."""
    optim: Optim = field(default_factory=Optim)
    loss: Loss = field(default_factory=Loss)
    augment: Augment = field(default_factory=Augment)
    mix: Mix = field(default_factory=Mix)
    tune: Tune = field(default_factory=Tune)
    masking: Masking = field(default_factory=Masking)
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which is then evaluated and kept; 0 turns it off."""
    dropout: float = 0.0
    """Dropout rate inside the network."""
    drop_path: float = 0.0
    """Stochastic depth rate of the last block."""
    seed: int = 0
    """Random seed."""
    workers: int | Auto = "auto"
    """Processes that load images."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or mps. auto: the fastest available."""
    precision: Precision | Auto = "auto"
    """Precision of the matrix products; weights stay float32. auto: bfloat16 where the hardware supports it."""
    engine: Literal["auto", "torch", "compiled", "onnxruntime", "openvino"] = "torch"
    """Engine that computes the features of the linear probe. auto measures the installed ones. Training uses torch."""
    compile: bool | Auto = "auto"
    """Compile the network with torch.compile: slower to start, then faster. auto: if a long run on a CPU is measured to
    end sooner."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for a third more time."""
    max_train_images: int | None = None
    """Train on at most this many images, an equal share of each class; validation images in proportion."""
    max_test_images: int | None = None
    """Test on a sample of at most this many images."""
    refit: bool | Auto = "auto"
    """After the comparison with the linear probe, also train the better model on the validation images. They must be
    taken from the training images. auto: with fewer than 5,000 images."""
    keep: Literal["best", "last"] = "best"
    """best: keep the weights of the epoch with the best validation scores. last: keep those of the last step."""
    patience: int = 0
    """Stop after this many epochs without an improvement. 0: never."""
    save_seconds: float = 30.0
    """Minimum seconds between two saved states, apart from those at the end of an epoch."""
    max_bad_fraction: float = 0.01
    """Maximum fraction of training images that may be unreadable. One image of a small dataset always may."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", normalize_device(self.device))
        _check_texts(self)
        _check_network(self.network)
        _check_numbers(self)
        if self.epochs == 0 and self.tune.what != "probe" and self.minutes is None:
            raise ConfigError("epochs must be above 0 (got 0).", hint="Use --tune probe to train no further.")
        if isinstance(self.batch_size, int) and self.batch_size % self.accumulate:
            raise ConfigError(f"batch_size={self.batch_size} is not a multiple of accumulate={self.accumulate}.")
        if self.engine != "torch" and not self.starts_with_probe:
            raise ConfigError(
                f"engine={self.engine!r} computes the features of a linear probe, but this run has none.",
                hint="Pass --from MODEL, or drop --engine.",
            )
        if self.keep == "last" and self.patience:
            raise ConfigError(
                "patience stops at the best epoch, but keep='last' keeps the last step.", hint="Drop one."
            )
        if self.optim.name == "adamw" and self.optim.momentum is not None:
            raise ConfigError(
                f"optim.momentum={self.optim.momentum:g} has no effect on adamw.",
                hint="Set optim.betas, or optim.momentum=none.",
            )

    @property
    def starts_with_probe(self) -> bool:
        """Whether a linear probe is fitted before the first step."""
        return bool(self.from_weights) and self.objective == "classify" and self.tune.probe

    @property
    def is_augmented(self) -> bool:
        """Whether training sees other images or labels than evaluation."""
        augment = self.augment
        amounts = (augment.flip, augment.rotate, augment.shear, augment.zoom, augment.shift, augment.jitter)
        labels = (self.mix.mixup, self.mix.cutmix, self.loss.smoothing)
        return augment.crop != "none" or any((*amounts, augment.erase, augment.randaugment, *labels))


# ---- resolved ----


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedOptim(Optim):
    lr: float = 1e-3
    layer_decay: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedLoss(Loss):
    kind: LossKind = "softmax"
    class_weights: ClassWeights = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedTune(Tune):
    what: TuneWhat = "all"
    blocks: int = 1
    views: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig(TrainConfig):
    """A TrainConfig whose choices are all made. Its length, `epochs` and `optim.warmup_steps`, is planned later, when
    the speed is known; the loop reads both from the `Job`."""

    image_size: int | tuple[int, int] = 224
    channels: int = 3
    resize: Resize = "crop"
    batch_size: int = 32
    parallel: Parallel = "ddp"
    workers: int = 0
    precision: Precision = "float32"
    compile: bool = False
    refit: bool = False
    optim: ResolvedOptim = field(default_factory=ResolvedOptim)
    loss: ResolvedLoss = field(default_factory=ResolvedLoss)
    tune: ResolvedTune = field(default_factory=ResolvedTune)


SECTIONS: dict[str, type[Any]] = {
    "optim": Optim,
    "loss": Loss,
    "augment": Augment,
    "mix": Mix,
    "tune": Tune,
    "masking": Masking,
}
_RESOLVED: dict[str, type[Any]] = {"optim": ResolvedOptim, "loss": ResolvedLoss, "tune": ResolvedTune}


def as_resolved(config: TrainConfig) -> ResolvedConfig:
    """Return the same settings as a ResolvedConfig. The caller has replaced every "auto"."""
    values = {item.name: getattr(config, item.name) for item in fields(TrainConfig)}
    for name, section in _RESOLVED.items():
        values[name] = section(**{item.name: getattr(values[name], item.name) for item in fields(SECTIONS[name])})
    return ResolvedConfig(**values)


# ---- checks ----

_COUNT = {"minimum": 1, "maximum": 2**31}
_COUNT_OR_ZERO = {"minimum": 0, "maximum": 2**31}
_AMOUNT = {"minimum": 0, "maximum": 1e6}
_FRACTION = {"minimum": 0, "below": 1}
_POSITIVE = {"above": 0, "maximum": 1e6}
BOUNDS: dict[str, Mapping[str, float]] = {
    **dict.fromkeys(("steps", "batch_size", "accumulate", "tune.blocks", "tune.rank"), _COUNT),
    **dict.fromkeys(("optim.warmup_steps", "seed", "patience"), _COUNT_OR_ZERO),
    **dict.fromkeys(("max_train_images", "max_test_images"), _COUNT),
    "tune.views": {"minimum": 0, "maximum": 1000},
    "tune.dropped": _FRACTION,
    **dict.fromkeys(("optim.weight_decay", "optim.clip", "optim.end_lr", "mix.mixup", "mix.cutmix"), _AMOUNT),
    **dict.fromkeys(("optim.momentum", "optim.betas", "optim.stairs", "loss.smoothing"), _FRACTION),
    **dict.fromkeys(("ema", "dropout", "drop_path"), _FRACTION),
    "epochs": _AMOUNT,
    **dict.fromkeys(("optim.lr", "optim.eps"), _POSITIVE),
    "val_fraction": {"above": 0, "below": 0.5},  # the larger part must be trained on
    "image_size": {"minimum": 1, "maximum": 16384},
    "channels": {"minimum": 1, "maximum": 10_000},
    "minutes": {"minimum": 0.01, "maximum": 1e7},
    "optim.layer_decay": {"above": 0, "maximum": 1},
    "workers": {"minimum": 0, "maximum": 1024},
    "save_seconds": {"minimum": 0, "maximum": 1e9},
    "max_bad_fraction": {"minimum": 0, "maximum": 1.0},
}


def _check_numbers(config: TrainConfig) -> None:
    for name, bounds in BOUNDS.items():
        value: Any = attrgetter(name)(config)
        minimum, maximum = bounds.get("minimum"), bounds.get("maximum")
        for number in cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,):
            if number is None or isinstance(number, str):
                continue
            if isinstance(number, int) and isinstance(minimum, int) and isinstance(maximum, int):
                check_int(name, number, minimum=minimum, maximum=maximum)
            else:
                check_number(name, number, **bounds)


def _check_texts(config: TrainConfig) -> None:
    texts = {"data": config.data, "val": config.val, "from": config.from_weights, "model": config.model}
    texts |= {"group_by": config.group_by, "drop": config.drop}
    for name, value in texts.items():
        if value is None:
            continue
        if name != "data" and not value.strip():  # collect_settings reports missing data
            raise ConfigError(f"{name}={value!r} is empty.", hint="Leave it out.")
        if "\0" in value or value.encode("utf-8", "replace").decode() != value:
            raise ConfigError(f"{name}={value!r} is not valid UTF-8, so config.toml cannot hold it.", hint="Rename it.")
    if config.from_weights and config.model != "auto":
        raise ConfigError(
            f"model={config.model!r} and from={config.from_weights!r} both name a network.",
            hint="Leave --model out: the checkpoint defines the network.",
        )


def _check_network(network: Mapping[str, Any]) -> None:
    if "num_classes" in network:
        raise ConfigError(
            f"network.num_classes={network['num_classes']!r} is not a setting: the dataset defines the classes.",
            hint="Leave it out.",
        )
    for name in ("image_size", "channels", "dropout", "drop_path"):
        if name in network:
            raise ConfigError(f"network.{name}={network[name]!r} is not a setting of its own.", hint=f"Use {name}.")
