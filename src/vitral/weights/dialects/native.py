"""Our own format: one safetensors file whose metadata store config, preprocessing, labels and provenance.

The metadata have one key, ``vitral``, which holds JSON. Its ``sha256`` covers names, dtypes, shapes and values of all
tensors. In other dialects ``vitral.hints`` stores what their layout has no room for: other readers skip it, and ours
does not have to guess.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral import __version__
from vitral.cache import keep_entry, read_entry
from vitral.errors import ConfigError, WeightsError, check_field_names, short_repr
from vitral.files import atomic_path
from vitral.model.bit_config import BiTConfig
from vitral.model.config import ConvStem, ResNetStem, Stem, ViTConfig
from vitral.preprocess import Preprocess
from vitral.weights.dialects.plan import Config, Content, LoadPlan, ModelSpec, Overrides
from vitral.weights.dialects.rules import rule
from vitral.weights.formats.safetensors import stream_safetensors, write_safetensors
from vitral.weights.formats.tensor_file import TensorFile, parse_json

KEY = "vitral"
HINTS_KEY = "vitral.hints"
CUSTOM_KEY = "vitral.custom"
"""Metadata of a training run with a network class of the caller's own: the name of the class."""
FORMAT_VERSION = 1
_STEMS = {"resnet": ResNetStem, "convolutions": ConvStem}


def recognizes(file: TensorFile) -> bool:
    """Return whether the metadata are ours."""
    return KEY in file.metadata


def plan(file: TensorFile, overrides: Overrides) -> LoadPlan:
    """Return the plan that the metadata describe."""
    return _plan_same_names(file, spec_from_dict(read_metadata(file), file))


def has_our_names(file: TensorFile) -> bool:
    """Return whether a state dict without metadata has the tensor names of our networks."""
    return "norm.weight" in file.shapes and ("patches.project.weight" in file.shapes or "root.weight" in file.shapes)


def plan_state_dict(file: TensorFile, config: Config) -> LoadPlan:
    """Return the plan for a state dict of our own names, whose config the caller passed."""
    preprocess = Preprocess(size=config.image_hw).with_channels(config.channels)
    assumed = {"preprocess": "preprocessing: mean and std 0.5, squash to the size; a state dict does not state it"}
    return _plan_same_names(file, ModelSpec(config=config, preprocess=preprocess, assumed=assumed))


def _plan_same_names(file: TensorFile, spec: ModelSpec) -> LoadPlan:
    rules = [rule(name, name) for name in file.shapes]
    return LoadPlan(dialect="native", file=file, spec=spec, rules=rules, keeps_dtype=True)


def read_metadata(file: TensorFile) -> dict[str, Any]:
    """Return our metadata, or raise WeightsError if they are damaged or of a later version."""
    metadata = parse_json(file.metadata[KEY], f"{file.name}: its metadata {KEY!r}")
    version = metadata.get("format")
    if type(version) is not int or version < 1:
        raise WeightsError(f"{file.name}: its metadata have no format version (got {short_repr(version)}).")
    if version > FORMAT_VERSION:
        problem = f"{file.name} has format version {version}; this vitral reads up to {FORMAT_VERSION}."
        raise WeightsError(problem, hint="Run: pip install --upgrade vitral")
    return metadata


def read_hints(file: TensorFile) -> ModelSpec | None:
    """Return the description in the metadata of another dialect, or None."""
    if HINTS_KEY not in file.metadata:
        return None
    return spec_from_dict(parse_json(file.metadata[HINTS_KEY], f"{file.name}: its metadata {HINTS_KEY!r}"), file)


def write(content: Content, path: Path) -> list[str]:
    """Write our own format."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in content.state.items()}
    write_safetensors(path, state, {KEY: json.dumps(_make_metadata(content, checksum(state)), ensure_ascii=False)})
    return []


def write_in_turn(content: Content, tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write our own format tensor by tensor, in the order of names; ``content.state`` has them on the meta device."""
    digest = hashlib.sha256()

    def check() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if not is_finite(tensor):
                raise WeightsError(f"{name} contains NaN or Inf. Nothing was written.")
            _add_to_checksum(digest, name, tensor.detach().cpu().contiguous())
            yield name, tensor

    def metadata() -> dict[str, str]:
        return {KEY: json.dumps(_make_metadata(content, digest.hexdigest()), ensure_ascii=False)}

    stream_safetensors(path, content.state, check(), metadata)


def _make_metadata(content: Content, sha256: str) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        **spec_as_dict(content),
        "provenance": {"vitral": __version__, "torch": torch.__version__, **content.provenance},
        "sha256": sha256,
    }


def write_state(content: Content, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict of another dialect: as safetensors with hints, or with torch.save for another suffix."""
    if path.suffix == ".safetensors":
        hints = json.dumps(spec_as_dict(content), ensure_ascii=False)
        write_safetensors(path, tensors, {"format": "pt", HINTS_KEY: hints})
        return
    with atomic_path(path) as temporary:
        torch.save(dict(tensors), temporary)


# ---- the description as JSON ----


def config_as_dict(config: Config) -> dict[str, Any]:
    """Return a config as plain JSON values."""
    fields = asdict(config)
    if isinstance(config, BiTConfig):
        return {"family": "bit", **fields}
    for kind, stem in _STEMS.items():
        if isinstance(config.stem, stem):
            fields["stem"] = {"kind": kind, **fields["stem"]}
    if not config.merge:
        del fields["merge"]  # older versions do not have it
    return fields


def config_from_dict(fields: dict[str, Any], tensors: int) -> Config:
    """Return the config that ``config_as_dict`` wrote; raise ConfigError if it needs more than so many tensors."""
    fields = dict(fields)
    family: type[Config] = BiTConfig if fields.get("family") == "bit" else ViTConfig
    if family is BiTConfig:
        del fields["family"]
    check_field_names(fields, of=family)
    if fields.get("position") in ("none", "relative"):  # older files may have a value that has no effect
        fields.pop("position_resample", None)
    if fields.get("stem") is not None:
        fields["stem"] = stem_from_dict(fields["stem"])
    config = family(**fields)
    stem = config.stem if isinstance(config, ViTConfig) else None
    layers = config.blocks + (sum(stem.stages) if isinstance(stem, ResNetStem) else 0)
    if layers > tensors:
        raise ConfigError(f"its config has {layers:,} layers, but the file has {tensors} tensors")
    return config


def stem_from_dict(fields: dict[str, Any]) -> Stem:
    """Return the stem that ``config_as_dict`` wrote."""
    return _STEMS[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def spec_as_dict(content: Content) -> dict[str, Any]:
    """Return everything but the tensors as plain JSON values."""
    return {
        "config": config_as_dict(content.network),
        "preprocess": content.preprocess.as_dict(),
        "labels": content.labels,
        "multi_label": content.multi_label,
        "assumed": list(content.assumed),
    }


def spec_from_dict(fields: dict[str, Any], file: TensorFile) -> ModelSpec:
    """Return the description that ``spec_as_dict`` wrote, or raise WeightsError if it is damaged."""
    try:
        config = config_from_dict(fields["config"], len(file.shapes))
        labels = fields.get("labels")
        if labels is not None:
            _check_labels(labels, config.num_classes)
        return ModelSpec(
            config=config,
            preprocess=Preprocess(**fields["preprocess"]),
            labels=None if labels is None else tuple(labels),
            multi_label=fields.get("multi_label") is True,
            assumed={_topic(sentence): sentence for sentence in map(str, fields.get("assumed") or ())},
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, ConfigError) as error:
        reason = str(error)[:300].rstrip(".")
        raise WeightsError(f"{file.name}: the model description in its metadata is damaged: {reason}.") from error


def _check_labels(labels: object, classes: int) -> None:
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ConfigError(f"labels must be a list of strings (got {short_repr(labels)})")
    if len(labels) != classes:
        raise ConfigError(f"it has {len(labels)} labels for {classes} classes")


def _topic(sentence: str) -> str:
    """Return the field that an assumption is about: heads for "heads=3: ..."."""
    word = sentence.split(":")[0].split("=")[0].strip()
    return "preprocess" if word == "preprocessing" else word


# ---- the checksum ----


def checksum(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of all tensors in the order of names: name, dtype, shape, values."""
    return _checksum_of((name, state[name]) for name in sorted(state))


def _checksum_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        _add_to_checksum(digest, name, tensor.contiguous())
    return digest.hexdigest()


def _add_to_checksum(digest: "hashlib._Hash", name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().data)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor contains neither NaN nor Inf; integers and empty tensors never do."""
    has_numbers = tensor.is_floating_point() and tensor.numel() > 0
    return not has_numbers or all(bound.isfinite() for bound in tensor.aminmax())


def has_valid_checksum(file: TensorFile) -> bool:
    """Return whether the tensors match the checksum that was written with them."""
    tensors = ((name, file.read(name)) for name in sorted(file.shapes))
    return _checksum_of(tensors) == read_metadata(file).get("sha256")


def verify_file(file: TensorFile, *, once: bool = False) -> None:
    """Raise WeightsError if a file of ours does not match its checksum; files of other dialects have none.

    This reads the whole file. ``once=True`` remembers verified files by path, size and modification time in vitral's
    cache folder, so that only the first prediction with a file pays for it.
    """
    if file.path is None or not recognizes(file):
        return
    key = _verified_key(file.path) if once else None
    if key is not None and read_entry("verified", key) is not None:
        return
    if not has_valid_checksum(file):
        problem = f"{file.path} is damaged or was changed: the SHA-256 of its tensors does not match its metadata."
        raise WeightsError(problem, hint="Copy or download it again.")
    if key is not None:
        keep_entry("verified", key, os.fsencode(file.path))


def _verified_key(path: Path) -> str | None:
    """Return the name of a file in the cache, or None if the file is gone."""
    try:
        path = path.resolve()
        status = path.stat()
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return None
    text = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
