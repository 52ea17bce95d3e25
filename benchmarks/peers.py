"""Build the same network in other libraries: copy our parameters into a peer's model with the rules of its dialect.

The peer itself checks that no parameter is missing or unexpected. The benchmarks and tests/parity use this module.
"""

import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitral.model.patches import cut
from vitral.model.vit import ViT
from vitral.weights.dialects import huggingface, timm, torchvision
from vitral.weights.dialects.rules import Rule


@cache
def repair_torchvision() -> None:
    """Make torchvision importable where its compiled extension does not fit torch; timm and transformers import it."""
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")


def in_timm(model: ViT) -> nn.Module:
    repair_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    config = model.config
    fields: dict[str, Any] = dict(
        **timm.model_args(config),
        in_chans=config.channels,
        num_classes=config.num_classes,
        norm_layer=lambda width, **kw: nn.LayerNorm(width, eps=config.norm_eps, **kw),
        dynamic_img_size=True,
    )
    token_rows = 0 if config.registers else int(config.has_class_token)
    return _loaded(VisionTransformer(**fields), _renamed(model, timm.rules(config, token_rows=token_rows)))


def in_naflex(model: ViT) -> nn.Module:
    """Return timm's network for mixed sizes, which pads to the longest image and masks keys."""
    repair_torchvision()
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    config = model.config
    fields: dict[str, Any] = dict(
        patch_size=config.patch_size,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_width / config.width,
        class_token=True,
        pos_embed_grid_size=config.table_grid,
        global_pool="token",
        use_key_only_attn_mask=True,
        patchify_channels_last=False,
    )
    peer = NaFlexVit(NaFlexVitCfg(**fields), num_classes=config.num_classes)
    theirs = _renamed(model, timm.rules(config, token_rows=0))
    theirs["embeds.cls_token"] = theirs.pop("cls_token")
    theirs["embeds.pos_embed"] = theirs.pop("pos_embed").unflatten(1, config.table_grid)
    theirs["embeds.proj.weight"] = theirs.pop("patch_embed.proj.weight").flatten(1)
    theirs["embeds.proj.bias"] = theirs.pop("patch_embed.proj.bias")
    return _loaded(peer, theirs)


def naflex_input(images: list[Tensor], model: ViT) -> dict[str, Tensor]:
    """Return what timm's collator returns: padded patches, their coordinates, and which are not padding."""
    patches = [cut(image[None], model.patches.patch_hw).flatten(2)[0] for image in images]
    grids = [model.config.grid(*image.shape[1:]) for image in images]
    coordinates = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in grids]
    lengths = torch.tensor([len(sequence) for sequence in patches])
    return {
        "patches": nn.utils.rnn.pad_sequence(patches, batch_first=True),
        "patch_coord": nn.utils.rnn.pad_sequence(coordinates, batch_first=True),
        "patch_valid": torch.arange(int(lengths.max())) < lengths[:, None],
    }


def in_transformers(model: ViT) -> nn.Module:
    repair_torchvision()
    from transformers import ViTConfig as TheirConfig
    from transformers import ViTForImageClassification

    config = model.config
    fields: dict[str, Any] = dict(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp_width,
        hidden_act={"gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh", "relu": "relu"}[config.activation],
        layer_norm_eps=config.norm_eps,
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_channels=config.channels,
        num_labels=config.num_classes,
    )
    peer = ViTForImageClassification(TheirConfig(**fields))
    in_memory = huggingface.Style(
        layers="layers",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        out="attention.o_proj",
        mlp=("mlp.fc1", "mlp.fc2"),
    )
    return LogitsOnly(_loaded(peer, _renamed(model, huggingface.rules(config, in_memory))))


class LogitsOnly(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, **options: Any) -> Tensor:
        return self.model(images, **options).logits


def in_torchvision(model: ViT) -> nn.Module:
    repair_torchvision()
    from torchvision.models.vision_transformer import VisionTransformer

    config = model.config
    fields: dict[str, Any] = dict(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_width,
        num_classes=config.num_classes,
        representation_size=config.representation,
    )
    return _loaded(VisionTransformer(**fields), _renamed(model, torchvision.rules(config)))


def in_vit_pytorch(model: ViT) -> nn.Module:
    """Return the nearest network of vit-pytorch: two more norms in its patch embedding make the outputs differ."""
    from vit_pytorch import ViT as TheirViT

    config = model.config
    return TheirViT(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_classes=config.num_classes,
        dim=config.width,
        depth=config.depth,
        heads=config.heads,
        mlp_dim=config.mlp_width,
        dim_head=config.head_dim,
    )


def _renamed(model: ViT, rules: Iterable[Rule]) -> dict[str, Tensor]:
    state, theirs = model.state_dict(), {}
    for rule in rules:
        tensors = rule.write(tuple(state[name] for name in rule.ours))
        theirs |= dict(zip(rule.theirs, tensors, strict=True))
    return theirs


def _loaded(peer: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    peer.load_state_dict(tensors, strict=True)
    return peer


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Make every parameter random and large enough to matter, so that no error hides behind a zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_matrix = name.endswith("weight") and parameter.ndim > 1
            std = parameter[0].numel() ** -0.5 if is_matrix else 0.3
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise + (1 if "norm" in name and name.endswith("weight") else 0))
    return model
