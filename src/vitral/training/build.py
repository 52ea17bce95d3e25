"""From settled settings to what is trained and what it is fed with."""

from dataclasses import replace
from functools import partial
from typing import Any

from vitral.data.batches import BatchLoader, ImageDataset
from vitral.data.dataset import DatasetIndex
from vitral.data.splits import Splits
from vitral.errors import ConfigError
from vitral.model.bit_config import BiTConfig
from vitral.model.config import Stem
from vitral.model.network import Config, Network, build
from vitral.model.sizes import named_config
from vitral.preprocess import Preprocess
from vitral.training.config import TrainConfig
from vitral.weights.dialects.config_json import stem_from
from vitral.weights.load import load, peek


def build_model(config: TrainConfig, classes: int) -> tuple[Network, Preprocess, list[str]]:
    """The network at the size of the run with a fresh head, its preprocessing, and what was done to the weights that
    it starts from."""
    fields: dict[str, Any] = {"num_classes": classes, **config.network}
    size, channels = config.image_size, config.channels
    assert not isinstance(size, str)
    assert not isinstance(channels, str)
    if isinstance(fields.get("stem"), dict):
        fields["stem"] = checked_stem(fields["stem"])
    own = peek(config.from_weights) if config.from_weights else named_config(config.model)
    if config.objective == "classify" and fields.get("pool", own.pool) == "none":
        raise ConfigError(
            "network.pool='none' answers for every token, and a picture has one truth.", hint="Use token, mean or map."
        )
    if config.from_weights:
        of_vit = {"representation": None}  # the paper's fine-tuning drops the hidden layer of the head
        fields = with_rates(config, own, of_vit) | fields
        loaded = load(config.from_weights, image_size=size, channels=channels, **fields)
        done = [] if loaded.report is None else [*loaded.report.resized.values(), *loaded.report.warnings]
        return loaded.model.float(), replace(loaded.preprocess, resize=config.resize), done
    fields = {"image_size": size, "channels": channels, **fields}
    pair = size if isinstance(size, tuple) else (size, size)
    crop = 0.875 if config.resize == "crop" else 1.0
    preprocess = Preprocess(size=pair, resize=config.resize, crop_fraction=crop)  # type: ignore[arg-type]
    fields = with_rates(config, own, {}) | fields
    return build(named_config(config.model, **fields)), preprocess.with_channels(int(fields["channels"])), []


def checked_stem(fields: dict[str, Any]) -> Stem:
    try:
        return stem_from(fields)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"network.stem={fields!r} must have kind='resnet' (with stages, width_factor) or kind='convolutions' (with "
            "widths, norm), and nothing else."
        ) from error


def with_rates(config: TrainConfig, network: Config, of_vit: dict[str, Any]) -> dict[str, Any]:
    """Fields that only a ViT has."""
    if not isinstance(network, BiTConfig):
        return {"dropout": config.dropout, "drop_path": config.drop_path, **of_vit}
    if config.dropout or config.drop_path:
        raise ConfigError("A BiT has neither dropout nor drop_path.", hint="Leave them at 0.")
    return {}


def build_loaders(
    config: TrainConfig, data: DatasetIndex, splits: Splits, preprocess: Preprocess, patch: tuple[int, int]
) -> tuple[BatchLoader, BatchLoader, BatchLoader]:
    """Of the pictures that are trained on, those that choose the best epoch, and those that are held out."""
    if preprocess.resize == "native" and (config.mix.mixup or config.mix.cutmix):
        raise ConfigError("mix needs pictures of one size, and resize='native' keeps theirs.", hint="Use resize=crop.")
    pictures = partial(ImageDataset, preprocess=preprocess, seed=config.seed, patch=patch)
    loader = partial(BatchLoader, classes=len(data.classes), multi_label=data.multi_label, workers=int(config.workers))
    size = int(config.batch_size)
    # What fits at a time; masked patches see to that by themselves, since what is hidden belongs to the whole batch.
    looked_at = size // config.accumulate if config.objective == "classify" else size
    return (
        loader(
            pictures=pictures(splits.train, how=config.augment), batch_size=min(size, len(splits.train)), shuffle=True
        ),
        loader(pictures=pictures(splits.validation), batch_size=looked_at),
        loader(pictures=pictures(splits.test), batch_size=looked_at),
    )
