"""What timm and its relatives call each of our tensors. The numbers lie as ours do, but for the table of positions: how
many of its rows are of tokens, ``ahead`` of those of patches, differs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vitral.model.config import ViTConfig
from vitral.weights.dialects.rules import ROWS, Layout, Rule, pair, pairs, patches, rule, zeros
from vitral.weights.formats.tensor_file import TensorFile


def rules(config: ViTConfig, *, ahead: int, file: TensorFile | None = None) -> Iterator[Rule]:
    """``file`` decides between the names that the family has for one thing."""
    names = () if file is None else file.shapes
    yield from pair("patches.project", "patch_embed.proj", patches(config.channels, config.patch_hw))
    yield from token_rules(config, ahead, "register_tokens" if "register_tokens" in names else "reg_token")
    has_bias = file is None or any(name.endswith("attn.qkv.bias") for name in names)
    for index in range(config.depth):
        block = f"blocks.{index}"
        yield from pairs(block, block, _BLOCK)
        yield rule(f"{block}.attention.to_qkv.weight", f"{block}.attn.qkv.weight")
        if has_bias:
            yield rule(f"{block}.attention.to_qkv.bias", f"{block}.attn.qkv.bias")
        else:
            yield rule(f"{block}.attention.to_qkv.bias", (), zeros(3 * config.width))
        if config.layer_scale is not None:
            yield rule(f"{block}.after_attention.scale", f"{block}.ls1.gamma")
            yield rule(f"{block}.after_mlp.scale", f"{block}.ls2.gamma")
    yield from pair("norm", "fc_norm" if config.norm_after_pool else "norm")
    if config.pool == "map":
        yield rule("pool.probe", "attn_pool.latent", ROWS)
        yield from pairs("pool", "attn_pool", _MAP)
    if config.num_classes:
        yield from pair("head", "head")


_BLOCK = {
    "norm1": "norm1",
    "attention.to_out": "attn.proj",
    "norm2": "norm2",
    "mlp.expand": "mlp.fc1",
    "mlp.contract": "mlp.fc2",
}
_MAP = {
    "to_q": "q",
    "to_kv": "kv",
    "to_out": "proj",
    "norm": "norm",
    "mlp.expand": "mlp.fc1",
    "mlp.contract": "mlp.fc2",
}


def token_rules(config: ViTConfig, ahead: int, registers: str) -> Iterator[Rule]:
    """Class token, registers and table; together where rows of the table belong to tokens that have none here."""
    has_table = config.position == "learned"
    names = [
        (ours, theirs)
        for ours, theirs, there in (
            ("class_token", "cls_token", config.has_class_token),
            ("registers", registers, config.registers > 0),
            ("positions.0.table", "pos_embed", has_table),
        )
        if there
    ]
    if not has_table or ahead == int(config.has_class_token):
        for ours, theirs in names:
            yield rule(ours, theirs, ROWS)
    else:
        yield rule(tuple(ours for ours, _ in names), tuple(theirs for _, theirs in names), _tokens(config, ahead))


def _tokens(config: ViTConfig, ahead: int) -> Layout:
    class_rows = int(config.has_class_token)

    def read(*theirs: Tensor) -> list[Tensor]:
        *tokens, table = (ROWS.read(part) for part in theirs)
        rows, of_patches = table[:ahead], table[ahead:]
        if ahead > class_rows:  # registers' rows go into the registers
            tokens[-1] = tokens[-1] + rows[class_rows:]
        class_row = rows[:class_rows] if ahead else table.new_zeros(class_rows, table.shape[1])
        return [*tokens, torch.cat([class_row, of_patches])]

    def write(*ours: Tensor) -> list[Tensor]:
        if ahead == 0 and class_rows:  # the class token's row goes into the token
            token, *registers, table = ours
            ours = token + table[:1], *registers, table[1:]
        return [part[None] for part in ours]

    return Layout(read=read, write=write)


def written_ahead(config: ViTConfig) -> int:
    """Rows ahead of the patches in what we write: timm gives registers none, and then the class token neither."""
    return 0 if config.registers else int(config.has_class_token)
