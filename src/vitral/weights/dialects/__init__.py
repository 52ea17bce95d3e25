"""The dialects: who calls which tensor what, and what their code does that the file does not say.

Each is a module with ``recognise(file)`` and ``read(file, asked)``; those that can be written also have
``write(content, path)``. Adding one is adding a module and a line here (docs/weights.md).
"""

import re
from types import ModuleType

from vitral.errors import WeightsError
from vitral.weights.dialects import (
    bit,
    google,
    huggingface,
    labml,
    native,
    tczhangzhi,
    timm,
    torchvision,
)
from vitral.weights.dialects.draft import Asked, Draft
from vitral.weights.formats.tensor_file import TensorFile

READERS: tuple[ModuleType, ...] = (native, google, bit, timm, huggingface, torchvision, tczhangzhi, labml)
WRITERS: dict[str, ModuleType] = {
    "native": native,
    "google": google,
    "big_vision": google,
    "bit": bit,
    "timm": timm,
    "huggingface": huggingface,
    "torchvision": torchvision,
}

# What training scripts and wrappers put ahead of every name.
_WRAPPERS = ("module.", "_orig_mod.", "model.", "backbone.", "visual.", "encoder.module.")

_REFUSED = {
    r"dist_token|distillation_token|head_dist|distillation_classifier": "it has a distillation token",
    r"mlp\.(w12|w3|w1|w2|fc1_g)\.|mlp\.weights_in": "its MLP is a SwiGLU, not two layers",
    r"relative_position_bias|rel_pos": "it adds learnt biases to the attention (as BEiT does)",
    r"(^|\.)(norm_pre|ln_pre|pre_layrnorm)\.": "it has a norm before the encoder (as CLIP does)",
    r"attn\.(q_norm|k_norm)\.": "it normalises queries and keys",
    r"patch_embed\.backbone\.": "its ResNet stem standardises weights with another epsilon than Google's; the same "
    "hybrids are in Google's npz files, which can be read",
    r"to_patch_embedding\.": "vit-pytorch puts norms around the patch embedding",
    r"self_attn\.in_proj_weight": "layers of torch's nn.TransformerEncoder are post-norm unless told otherwise, and "
    "the file does not tell",
}


def draft_of(file: TensorFile, asked: Asked) -> Draft:
    """What the first dialect that recognises the file makes of it."""
    for candidate in _without_wrappers(file):
        for dialect in READERS:
            if dialect.recognise(candidate):
                if dialect is not native:
                    _refuse(candidate)
                return dialect.read(candidate, asked)
    _refuse(file)
    names = sorted(file.shapes)
    raise WeightsError(
        f"{file.path} is in no dialect that vitral knows: it holds {len(names)} tensors such as "
        f"{', '.join(names[:4]) or 'none'}.",
        hint=f"Known are {', '.join(sorted({*WRITERS, 'deit', 'mae', 'dinov2', 'labml', 'tczhangzhi'}))}.",
    )


def _without_wrappers(file: TensorFile) -> list[TensorFile]:
    candidates = [file]
    for prefix in _WRAPPERS * 2:
        inside = [name for name in candidates[-1].shapes if name.startswith(prefix)]
        if inside:
            candidates.append(candidates[-1].below(prefix, lambda _, p=prefix: f"not under {p!r}"))
    return candidates


def _refuse(file: TensorFile) -> None:
    for pattern, reason in _REFUSED.items():
        found = next((name for name in file.shapes if re.search(pattern, name)), None)
        if found:
            raise WeightsError(f"{file.path} cannot be represented: {reason} (tensor {found}).")
