"""The dialects: how other libraries name their tensors, and constants of their code that a file does not state.

Each dialect is a module with ``recognizes(file)`` and ``plan(file, overrides)``; one that vitral can write also has
``write(content, path)``. To add one, add a module and a line here (docs/weights.md).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from vitral.errors import WeightsError, short_repr
from vitral.model.config import ViTConfig
from vitral.weights.dialects import bit, google, huggingface, labml, native, tczhangzhi, timm, torchvision
from vitral.weights.dialects.content import Content
from vitral.weights.dialects.plan import Config, LoadPlan, Overrides, as_pair
from vitral.weights.formats.tensor_file import TensorFile


class Reader(Protocol):
    """A dialect that vitral reads."""

    def recognizes(self, file: TensorFile) -> bool: ...
    def plan(self, file: TensorFile, overrides: Overrides) -> LoadPlan: ...


class Writer(Protocol):
    """A dialect that vitral writes; ``write`` returns notes for the user."""

    def write(self, content: Content, path: Path) -> list[str]: ...


READERS: tuple[Reader, ...] = (native, google, bit, timm, huggingface, torchvision, tczhangzhi, labml)
WRITERS: dict[str, Writer] = {
    "native": native,
    "google": google,
    "big_vision": google,
    "bit": bit,
    "timm": timm,
    "huggingface": huggingface,
    "torchvision": torchvision,
}
CONSTANTS: dict[str, dict[str, Any]] = {"timm": {"norm_eps": 1e-6}, "torchvision": {"norm_eps": 1e-6}}
"""Config fields that a library fixes in its code, so that no file of the dialect can change them.

google and big_vision fix more, and their writers refuse other values. transformers reads every field from config.json.
"""

# Prefixes that training scripts and wrappers add to every name.
_WRAPPERS = ("module.", "_orig_mod.", "model.", "backbone.", "visual.", "encoder.module.")

_UNSUPPORTED = {
    r"dist_token|distillation_token|head_dist|distillation_classifier": "it has a distillation token",
    r"mlp\.(w12|w3|w1|w2|fc1_g)\.|mlp\.weights_in": "its MLP is a SwiGLU, not two layers",
    r"relative_position_bias|rel_pos": "it adds learned biases to the attention, as BEiT does",
    r"(^|\.)(norm_pre|ln_pre|pre_layrnorm)\.": "it has a norm before the encoder, as CLIP does",
    r"attn\.(q_norm|k_norm)\.": "it normalizes queries and keys",
    r"patch_embed\.backbone\.": "its ResNet stem standardizes weights with another epsilon than Google's; Google's npz "
    "files contain the same hybrids",
    r"to_patch_embedding\.": "vit-pytorch puts norms around the patch embedding",
    r"self_attn\.in_proj_weight": "layers of torch's nn.TransformerEncoder are pre-norm or post-norm, and the file "
    "does not state which",
}


def plan_load(file: TensorFile, overrides: Overrides, config: Config | None = None) -> LoadPlan:
    """Return the plan of the first dialect that recognizes the file, or raise WeightsError.

    ``config`` replaces the inferred one. It is required for a state dict with our own names.
    """
    if native.CUSTOM_KEY in file.metadata:
        raise WeightsError(
            f"{file.name} has the weights of another network class, {short_repr(file.metadata[native.CUSTOM_KEY])}.",
            hint="Load them into it with model.load_state_dict(safetensors.torch.load_file(path)).",
        )
    candidates = _unwrap(file)
    inferred = overrides if config is None else {**_hidden_fields(config), **overrides}
    for candidate in candidates:
        for dialect in READERS:
            if dialect.recognizes(candidate):
                if dialect is not native:
                    _check_supported(candidate)
                plan = dialect.plan(candidate, inferred)
                plan = replace(plan, warnings=tuple(contradictions(plan)))
                return plan if config is None else replace(plan, spec=replace(plan.spec, config=config))
    ours = next((candidate for candidate in candidates if native.has_our_names(candidate)), None)
    if ours is not None and config is not None:
        return native.plan_state_dict(ours, config)
    if ours is not None:
        raise WeightsError(
            f"{file.name} has vitral's tensor names, but no metadata.", hint="Pass config=, such as model.config."
        )
    _check_supported(file)
    names = sorted(file.shapes)
    raise WeightsError(
        f"{file.name} has no known dialect ({len(names)} tensors such as {', '.join(names[:4])[:200] or 'none'}).",
        hint=f"vitral reads {', '.join(sorted({*WRITERS, 'deit', 'mae', 'dinov2', 'labml', 'tczhangzhi'}))}.",
    )


def _hidden_fields(config: Config) -> dict[str, Any]:
    """Return the fields that shapes do not always determine."""
    if not isinstance(config, ViTConfig):
        return {}
    return {"heads": config.heads, "image_size": config.image_hw, "position_grid": config.table_grid}


def _unwrap(file: TensorFile) -> list[TensorFile]:
    """Return the file, and the file below each prefix that a wrapper adds."""
    candidates = [file]
    for prefix in _WRAPPERS * 2:
        if any(name.startswith(prefix) for name in candidates[-1].shapes):
            candidates.append(candidates[-1].below(prefix, lambda _, p=prefix: f"not under {p!r}"))
    return candidates


def _check_supported(file: TensorFile) -> None:
    for pattern, reason in _UNSUPPORTED.items():
        tensor = next((name for name in file.shapes if re.search(pattern, name)), None)
        if tensor:
            raise WeightsError(f"vitral does not support {file.name}: {reason} (tensor {tensor}).")


# ---- config.json against the tensors ----

_FIELDS = {  # keys of transformers and timm -> our field
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "intermediate_size": "mlp_width",
    "num_channels": "channels",
    "patch_size": "patch_size",
    "num_features": "width",
    "embed_dim": "width",
    "depth": "depth",
    "in_chans": "channels",
    "num_classes": "num_classes",
}
_MODEL_TYPES = {
    "huggingface": ("vit", "vit_mae", "vit_msn", "vit_hybrid", "deit"),
    "dinov2": ("dinov2", "dinov2_with_registers"),
}


def contradictions(plan: LoadPlan) -> Iterator[str]:
    """Yield a warning for every value in config.json that the tensors contradict."""
    stated, config = plan.file.sidecars.get("config.json", {}), plan.spec.config
    if not isinstance(config, ViTConfig):
        return
    arguments = stated.get("model_args")
    sections: tuple[Mapping[str, Any], ...] = (stated, arguments if isinstance(arguments, dict) else {})
    for key, field in _FIELDS.items():
        for value in (section[key] for section in sections if section.get(key) is not None):
            actual = getattr(config, field)
            if value != actual and as_pair(value) != as_pair(actual):
                yield f"config.json states {key}={short_repr(value)}, but the tensors have {actual}, which is used."
    model_type = stated.get("model_type")
    expected = _MODEL_TYPES.get(plan.dialect, ("vit",))
    if model_type is not None and model_type not in expected:
        yield f"config.json states model_type={short_repr(model_type)}, but the tensors are those of {expected[0]}."
    labels = plan.spec.labels
    if labels and len(labels) != config.num_classes:
        yield f"config.json has {len(labels)} labels, which are ignored: the head has {config.num_classes} classes."
