"""The dialects: how other libraries name their tensors, and constants of their code that a file does not state.

Each dialect is a module with ``recognizes(file)`` and ``plan(file, overrides)``; one that vitral can write also has
``write(content, path)``, which returns notes for the user. To add one, add a module and a line here
(docs/reference/dialects.md).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from vitral.errors import WeightsError, short_repr
from vitral.model.config import ViTConfig
from vitral.weights.dialects import bit, google, huggingface, labml, native, shapes, tczhangzhi, timm, torchvision
from vitral.weights.dialects.plan import Config, LoadPlan, Overrides
from vitral.weights.formats.tensor_file import TensorFile

READERS = (native, google, bit, timm, huggingface, torchvision, tczhangzhi, labml)
WRITERS: dict[str, ModuleType] = {
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

google and big_vision fix more, and their writers refuse other values.
"""
BARE_FILE_DEFAULTS: dict[str, dict[str, Any]] = {
    "timm": {"activation": "gelu"},
    "huggingface": {"norm_eps": 1e-12, "activation": "gelu"},
}
"""Config fields that config.json states in a folder, and that a library sets to these values for a bare file."""

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
    inferred = overrides
    if isinstance(config, ViTConfig):  # fields that shapes do not always determine
        hidden = {"heads": config.heads, "image_size": config.image_hw, "position_grid": config.table_grid}
        inferred = {**hidden, **overrides}
    for candidate in candidates:
        for dialect in READERS:
            if dialect.recognizes(candidate):
                if dialect is not native:
                    _check_supported(candidate)
                plan = dialect.plan(candidate, inferred)
                plan = replace(plan, warnings=tuple(contradictions(plan)))
                return plan if config is None else replace(plan, spec=replace(plan.spec, config=config))
    if ours := next(filter(native.has_our_names, candidates), None):
        if config is not None:
            return native.plan_state_dict(ours, config)
        hint = "Pass config=, such as model.config."
        raise WeightsError(f"{file.name} has vitral's tensor names, but no metadata.", hint=hint)
    _check_supported(file)
    names = sorted(file.shapes)
    raise WeightsError(
        f"{file.name} has no known dialect ({len(names)} tensors such as {', '.join(names[:4])[:200] or 'none'}).",
        hint=f"vitral reads {', '.join(sorted({*WRITERS, 'deit', 'mae', 'dinov2', 'labml', 'tczhangzhi'}))}.",
    )


def _unwrap(file: TensorFile) -> list[TensorFile]:
    """Return the file, and the file below each prefix that a wrapper adds."""
    candidates = [file]
    for prefix in _WRAPPERS * 2:
        if any(name.startswith(prefix) for name in candidates[-1].shapes):
            candidates.append(candidates[-1].below(prefix, lambda _, p=prefix: f"not under {p!r}"))
    return candidates


def _check_supported(file: TensorFile) -> None:
    for pattern, reason in _UNSUPPORTED.items():
        if tensor := next((name for name in file.shapes if re.search(pattern, name)), None):
            raise WeightsError(f"vitral does not support {file.name}: {reason} (tensor {tensor}).")


# ---- config.json against the tensors ----

_STATED_AS = {  # our field -> keys of transformers and timm
    "width": ("hidden_size", "num_features", "embed_dim"),
    "depth": ("num_hidden_layers", "depth"),
    "mlp_width": ("intermediate_size",),
    "channels": ("num_channels", "in_chans"),
    "patch_size": ("patch_size",),
    "num_classes": ("num_classes",),
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
    for field, key in ((field, key) for field, keys in _STATED_AS.items() for key in keys):
        for value in (section[key] for section in sections if section.get(key) is not None):
            actual = getattr(config, field)
            if value != actual and shapes.as_pair(value) != shapes.as_pair(actual):
                yield f"config.json states {key}={short_repr(value)}, but the tensors have {actual}, which is used."
    model_type = stated.get("model_type")
    expected = _MODEL_TYPES.get(plan.dialect, ("vit",))
    if model_type is not None and model_type not in expected:
        yield f"config.json states model_type={short_repr(model_type)}, but the tensors are those of {expected[0]}."
    labels = plan.spec.labels
    if labels and len(labels) != config.num_classes:
        yield f"config.json has {len(labels)} labels, which are ignored: the head has {config.num_classes} classes."
