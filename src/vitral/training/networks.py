"""Build the network of a run: from its name, from a checkpoint, or the caller's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitral.errors import ConfigError
from vitral.files import sha256_of
from vitral.model.bit_config import BiTConfig
from vitral.model.config import Stem
from vitral.model.network import Network, build
from vitral.model.sizes import canonical_name, named_config
from vitral.preprocess import Preprocess
from vitral.training.config import CUSTOM_MODEL, ResolvedConfig
from vitral.training.sharded_models import builds_shards, create_shards, load_shards
from vitral.weights.dialects.native import stem_from_dict
from vitral.weights.formats.opening import open_tensors
from vitral.weights.hub import locate
from vitral.weights.load import load, peek


def build_model(
    config: ResolvedConfig, classes: int, network: Network | None = None
) -> tuple[Network, Preprocess, list[str]]:
    """Return the network at the size of the run with a new head, its preprocessing, and how its weights changed."""
    torch.manual_seed(config.seed)  # pyright: ignore[reportUnknownMemberType]
    if network is not None:
        return adopt_network(network, classes, config)
    if config.model.startswith(CUSTOM_MODEL):
        raise ConfigError(
            f"This run trains a network of your own ({config.model.removeprefix(CUSTOM_MODEL)}).",
            hint="Pass it again in Python: vitral.train(resume=..., model=network).",
        )
    fields: dict[str, Any] = {"num_classes": classes, **config.network}
    if isinstance(fields.get("stem"), dict):
        fields["stem"] = parse_stem(fields["stem"])
    base = peek(config.from_weights).config if config.from_weights else named_config(config.model)
    if config.objective == "classify" and fields.get("pool", base.pool) == "none":
        raise ConfigError(
            "network.pool=none gives logits per token, but classification needs them per image.",
            hint="Use token, mean or map.",
        )
    if not isinstance(base, BiTConfig):
        fields = {"dropout": config.dropout, "drop_path": config.drop_path, **fields}
    elif config.dropout or config.drop_path:
        raise ConfigError("A BiT has neither dropout nor drop_path.", hint="Leave them at 0.")
    if config.from_weights:
        if not isinstance(base, BiTConfig):  # the paper's fine-tuning drops the hidden layer of the head
            fields = {"representation": None, **fields}
        fields = {"image_size": config.image_size, "channels": config.channels, **fields}
        is_divided = builds_shards(config)
        loaded = (
            load_shards(config.from_weights, config, **fields) if is_divided else load(config.from_weights, **fields)
        )
        changes = [] if loaded.report is None else [*loaded.report.resized.values(), *loaded.report.warnings]
        model = loaded.model if is_divided else loaded.model.float()
        return model, replace(loaded.preprocess, resize=config.resize), changes
    fields = {"image_size": config.image_size, "channels": config.channels, **fields}
    described = named_config(config.model, **fields)
    network = create_shards(described, config) if builds_shards(config) else build(described)
    return network, make_preprocess(config), []


def make_preprocess(config: ResolvedConfig) -> Preprocess:
    """Return the preprocessing of a network that is trained from scratch."""
    size = config.image_size if isinstance(config.image_size, tuple) else (config.image_size, config.image_size)
    crop_fraction = 0.875 if config.resize == "crop" else 1.0
    preprocess = Preprocess(size=size, resize=config.resize, crop_fraction=crop_fraction)
    return preprocess.with_channels(config.channels)


def adopt_network(network: Network, classes: int, config: ResolvedConfig) -> tuple[Network, Preprocess, list[str]]:
    """Return a network of the caller's own, with a new head if it has another number of classes."""
    if config.network or config.dropout or config.drop_path:
        raise ConfigError("network, dropout and drop_path do not apply to a network of your own.", hint="Drop them.")
    sizes = (config.image_size, (config.image_size, config.image_size))
    if network.config.image_hw not in sizes or network.config.channels != config.channels:
        raise ConfigError(
            f"Your network takes {network.config.image_hw} pixels and {network.config.channels} channels, but the "
            f"settings say {config.image_size} and {config.channels}.",
            hint="Build it with the same image_size and channels.",
        )
    if network.config.num_classes != classes:
        network.reset_head(classes)
    return network, make_preprocess(config), []


def parse_stem(fields: dict[str, Any]) -> Stem:
    try:
        return stem_from_dict(fields)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"network.stem={fields!r} is not a stem.",
            hint="Use kind='resnet' (with stages, width_factor) or kind='convolutions' (with widths, norm).",
        ) from error


def hash_base(config: ResolvedConfig) -> str | None:
    """Return the SHA-256 of the checkpoint that a partial training belongs to."""
    if not config.from_weights or config.tune.what == "all":
        return None
    path = open_tensors(locate(config.from_weights)).path
    return sha256_of(path) if path is not None and path.is_file() else None


def name_model(config: ResolvedConfig) -> str:
    """Return the name of the model in the name of the run folder."""
    if config.from_weights:
        return Path(config.from_weights.removeprefix("hf:")).stem
    if config.model.startswith(CUSTOM_MODEL):
        return config.model.removeprefix(CUSTOM_MODEL)
    return canonical_name(config.model)
