"""The same network in other people's code: builds a peer's model and copies our parameters into it, tensor by tensor.

Used by the benchmarks, which compare outputs before they compare times, and by tests/parity.
"""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitral.model.config import ViTConfig
from vitral.model.vit import ViT


@cache
def mend_torchvision() -> None:
    """Where torchvision's compiled part does not fit the installed torch, its Python part works without it; timm
    and transformers import it too."""
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")


ACTIVATIONS = {"gelu": nn.GELU, "gelu-tanh": lambda: nn.GELU(approximate="tanh"), "relu": nn.ReLU}


def in_timm(model: ViT) -> nn.Module:
    mend_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    config = model.config
    fields: dict[str, Any] = dict(
        **_timm_sizes(config),
        global_pool={"token": "token", "mean": "avg", "map": "map", "none": ""}[config.pool],
        class_token=config.has_class_token,
        no_embed_class=bool(config.registers),
        reg_tokens=config.registers,
        init_values=config.layer_scale,
        fc_norm=config.norm_after_pool,
        norm_layer=lambda width, **kw: nn.LayerNorm(width, eps=config.norm_eps, **kw),
        act_layer=ACTIVATIONS[config.activation],
        dynamic_img_size=True,
    )
    peer = VisionTransformer(**fields)
    ours, theirs = model.state_dict(), {}
    table = ours["positions.0.table"]
    if config.registers:  # a table of patches alone: what was added to the class token goes into it
        theirs["cls_token"] = (ours["class_token"] + table[:1])[None]
        table = table[1:]
    elif config.has_class_token:
        theirs["cls_token"] = ours["class_token"][None]
    theirs["pos_embed"] = table[None]
    if config.registers:
        theirs["reg_token"] = ours["registers"][None]
    theirs |= _renamed(ours, "patches.project", "patch_embed.proj", weight=_as_convolution(config))
    theirs |= _renamed(ours, "norm", "fc_norm" if config.norm_after_pool else "norm")
    theirs |= _renamed(ours, "head", "head")
    theirs |= _timm_blocks(ours, config)
    if config.pool == "map":
        theirs["attn_pool.latent"] = ours["pool.probe"][None]
        for our, their in _TIMM_MAP.items():
            theirs |= _renamed(ours, f"pool.{our}", f"attn_pool.{their}")
    return _loaded(peer, theirs)


def in_naflex(model: ViT) -> nn.Module:
    """timm's network for mixed sizes: pads to the longest image and masks keys."""
    mend_torchvision()
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
    ours, theirs = model.state_dict(), {}
    table = ours["positions.0.table"]
    theirs["embeds.cls_token"] = (ours["class_token"] + table[:1])[None]
    theirs["embeds.pos_embed"] = table[1:].unflatten(0, config.table_grid)[None]
    theirs |= _renamed(ours, "patches.project", "embeds.proj")
    theirs |= _renamed(ours, "norm", "norm") | _renamed(ours, "head", "head") | _timm_blocks(ours, config)
    return _loaded(peer, theirs)


def naflex_input(images: list[Tensor], model: ViT) -> dict[str, Tensor]:
    """What timm's collator gives: patches padded to the longest image, their coordinates, and which are real."""
    patches = [model.patches.cut(image[None])[0] for image in images]
    grids = [model.config.grid(*image.shape[1:]) for image in images]
    places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in grids]
    lengths = torch.tensor([len(part) for part in patches])
    return {
        "patches": nn.utils.rnn.pad_sequence(patches, batch_first=True),
        "patch_coord": nn.utils.rnn.pad_sequence(places, batch_first=True),
        "patch_valid": torch.arange(int(lengths.max())) < lengths[:, None],
    }


def in_transformers(model: ViT) -> nn.Module:
    mend_torchvision()
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
    ours, theirs = model.state_dict(), {}
    theirs["vit.embeddings.cls_token"] = ours["class_token"][None]
    theirs["vit.embeddings.position_embeddings"] = ours["positions.0.table"][None]
    patch = "vit.embeddings.patch_embeddings.projection"
    theirs |= _renamed(ours, "patches.project", patch, weight=_as_convolution(config))
    theirs |= _renamed(ours, "norm", "vit.layernorm")
    theirs |= _renamed(ours, "head", "classifier")
    for i in range(config.depth):
        for our, their in _TRANSFORMERS_BLOCK.items():
            theirs |= _renamed(ours, f"blocks.{i}.{our}", f"vit.layers.{i}.{their}")
        for kind in ("weight", "bias"):
            parts = ours[f"blocks.{i}.attention.to_qkv.{kind}"].chunk(3)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                theirs[f"vit.layers.{i}.attention.{name}.{kind}"] = part
    return LogitsOnly(_loaded(peer, theirs))


class LogitsOnly(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, **options: Any) -> Tensor:
        return self.model(images, **options).logits


def in_torchvision(model: ViT) -> nn.Module:
    mend_torchvision()
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
    peer = VisionTransformer(**fields)
    ours, theirs = model.state_dict(), {}
    theirs["class_token"] = ours["class_token"][None]
    theirs["encoder.pos_embedding"] = ours["positions.0.table"][None]
    theirs |= _renamed(ours, "patches.project", "conv_proj", weight=_as_convolution(config))
    theirs |= _renamed(ours, "norm", "encoder.ln")
    theirs |= _renamed(ours, "head", "heads.head")
    if config.representation:
        theirs |= _renamed(ours, "representation.0", "heads.pre_logits")
    for i in range(config.depth):
        for our, their in _TORCHVISION_BLOCK.items():
            theirs |= _renamed(ours, f"blocks.{i}.{our}", f"encoder.layers.encoder_layer_{i}.{their}")
        for kind in ("weight", "bias"):
            key = f"encoder.layers.encoder_layer_{i}.self_attention.in_proj_{kind}"
            theirs[key] = ours[f"blocks.{i}.attention.to_qkv.{kind}"]
    return _loaded(peer, theirs)


def in_vit_pytorch(model: ViT) -> nn.Module:
    """The nearest that vit-pytorch has: it adds two norms in the patch embedding, so outputs cannot be equal."""
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


_TIMM_BLOCK = {
    "norm1": "norm1",
    "attention.to_qkv": "attn.qkv",
    "attention.to_out": "attn.proj",
    "norm2": "norm2",
    "mlp.expand": "mlp.fc1",
    "mlp.contract": "mlp.fc2",
}
_TIMM_MAP = {
    "to_q": "q",
    "to_kv": "kv",
    "to_out": "proj",
    "norm": "norm",
    "mlp.expand": "mlp.fc1",
    "mlp.contract": "mlp.fc2",
}
_TRANSFORMERS_BLOCK = {
    "norm1": "layernorm_before",
    "attention.to_out": "attention.o_proj",
    "norm2": "layernorm_after",
    "mlp.expand": "mlp.fc1",
    "mlp.contract": "mlp.fc2",
}
_TORCHVISION_BLOCK = {
    "norm1": "ln_1",
    "attention.to_out": "self_attention.out_proj",
    "norm2": "ln_2",
    "mlp.expand": "mlp.0",
    "mlp.contract": "mlp.3",
}


def _timm_sizes(config: ViTConfig) -> dict[str, Any]:
    return dict(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.channels,
        num_classes=config.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_width / config.width,
    )


def _timm_blocks(ours: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    theirs = {}
    for i in range(config.depth):
        for our, their in _TIMM_BLOCK.items():
            theirs |= _renamed(ours, f"blocks.{i}.{our}", f"blocks.{i}.{their}")
        if config.layer_scale is not None:
            theirs[f"blocks.{i}.ls1.gamma"] = ours[f"blocks.{i}.after_attention.scale"]
            theirs[f"blocks.{i}.ls2.gamma"] = ours[f"blocks.{i}.after_mlp.scale"]
    return theirs


def _as_convolution(config: ViTConfig) -> Any:
    return lambda weight: weight.unflatten(1, (config.channels, *config.patch_hw))


def _renamed(ours: dict[str, Tensor], our: str, their: str, weight: Any = lambda tensor: tensor) -> dict[str, Tensor]:
    return {f"{their}.weight": weight(ours[f"{our}.weight"]), f"{their}.bias": ours[f"{our}.bias"]}


def _loaded(peer: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    peer.load_state_dict(tensors, strict=True)
    return peer


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random and large enough to matter, so that nothing hides behind a zero or a whisper."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_matrix = name.endswith("weight") and parameter.ndim > 1
            spread = parameter[0].numel() ** -0.5 if is_matrix else 0.3
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(noise + (1 if "norm" in name and name.endswith("weight") else 0))
    return model
