"""Multiply matrices in float32 with oneDNN instead of torch's default library, which is slow on some CPUs.

torch calls MKL, which has no AVX-512 kernels for the CPUs of other vendors: on an AMD EPYC it reaches 45 % of the speed
of oneDNN, which torch contains as well. The results differ in the last bits, as between two CPUs.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

MIN_ROWS = 512
"""oneDNN takes far longer for some small products, such as those of a head. They do not matter."""
CHECK_SHAPE = (MIN_ROWS, 64)


class OneDnnProducts(TorchFunctionMode):
    """Compute the large linear layers of a forward pass inside this context, and their gradients, with oneDNN."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func is F.linear and not kwargs and _is_large(*args):
            inputs, weight, bias = (*args, None)[:3]
            return cast(Tensor, _Linear.apply(inputs, weight, bias))  # pyright: ignore[reportUnknownMemberType]
        return func(*args, **(kwargs or {}))


def has_onednn() -> bool:
    """Return whether this build of torch multiplies matrices with oneDNN."""
    try:
        inputs, weight = torch.ones(CHECK_SHAPE), torch.ones(CHECK_SHAPE)
        return torch.equal(_product(inputs, weight), inputs @ weight.T)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _is_large(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    tensors = [inputs, weight] if bias is None else [inputs, weight, bias]
    is_plain = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    return is_plain and inputs.numel() >= MIN_ROWS * inputs.shape[-1]


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return inputs @ weight.T + bias."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], ""))


class _Linear(torch.autograd.Function):
    """`F.linear` by oneDNN."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401
        *gradients: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            _product(gradient, weight.T) if needs_inputs else None,
            _product(rows.T, inputs.reshape(-1, inputs.shape[-1]).T) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
