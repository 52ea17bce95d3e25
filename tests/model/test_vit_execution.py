"""ViT under torch.compile, torch.export, gradient checkpointing, half precision and autocast.

Compilers trace the code as users run it, so those tests run in a subprocess, without the shape checks of the other
tests.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.conftest import small_model

SCRIPT = """
import sys, traceback, warnings
warnings.simplefilter("error", UserWarning)
import torch, vitral
from tests.conftest import small_model

VARIANTS = [
    dict(),
    dict(pool="mean", registers=2, layer_scale=0.1),
    dict(depth=2, merge=3),
    dict(pool="map", position="learned-2d", position_at="every-layer"),
    dict(position="relative", attention="axial"),
    dict(position="sincos-2d", stem=vitral.ConvStem(widths=(8, 8)), patch_size=1),
    dict(stem=vitral.ResNetStem(stages=(1,)), patch_size=1),
]
images = torch.randn(2, 3, 16, 16)


def compiles_as_one_graph_for_training_and_prediction():
    for variant in VARIANTS:
        model = small_model(**{"depth": 1, **variant})
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
        wide = torch.randn(1, 3, 16, 24)  # another size: positions are resampled inside the graph
        with torch.no_grad():
            torch.testing.assert_close(compiled(wide), model(wide), atol=1e-5, rtol=1e-5)
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager").train()  # with gradients
        logits = compiled(images)
        torch.testing.assert_close(logits, model(images), atol=1e-5, rtol=1e-5)
        logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        torch.compiler.reset()


def compiles_with_dynamic_batch():
    model = small_model(depth=1)
    graphs = []
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for batch in (2, 5, 7):
        images = torch.randn(batch, 3, 16, 16)
        torch.testing.assert_close(compiled(images), model(images))
    assert len(graphs) == 1, len(graphs)


def attention_of_a_compiled_model_can_be_recorded():
    model = small_model()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(images)
        with vitral.record_attention(model) as expected:
            model(images)
        with vitral.record_attention(compiled) as maps:
            compiled(images)
        torch.testing.assert_close(maps[1], expected[1])
        before = maps[1]
        compiled(images + 1)
        assert maps[1] is before


def exports_with_dynamic_batch():
    for variant in VARIANTS[:3]:  # tests/exporting exports the others
        model = small_model(**{"depth": 1, **variant})
        batch = torch.export.Dim("batch", min=1, max=64)
        program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
        others = torch.randn(5, 3, 16, 16)
        torch.testing.assert_close(program.module()(others), model(others), atol=1e-5, rtol=1e-5)


for test in sys.argv[1:]:
    try:
        globals()[test]()
    except Exception:
        print(test, traceback.format_exc()[-3000:], sep="\\n", end="\\0")
    torch.compiler.reset()
"""
COMPILERS = (
    "compiles_as_one_graph_for_training_and_prediction",
    "compiles_with_dynamic_batch",
    "attention_of_a_compiled_model_can_be_recorded",
    "exports_with_dynamic_batch",
)


def test_compilers() -> None:
    """All functions of the script run in one process and one test, because importing the compiler takes seconds."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *COMPILERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stdout, done.stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "variant",
    [dict(), dict(position="sincos-2d", pool="mean"), dict(position="relative", registers=1), dict(pool="map")],
    ids=str,
)
def test_half_precision(dtype: torch.dtype, variant: dict[str, Any]) -> None:
    model = small_model(**variant)
    for size in ((16, 16), (24, 8)):
        images = torch.randn(4, 3, *size)
        exact = model.float()(images)
        half = model.to(dtype)(images.to(dtype))
        assert half.dtype == dtype
        torch.testing.assert_close(half.float(), exact, atol=0.15, rtol=0.05)
    packed = model([torch.randn(3, 16, 16, dtype=dtype), torch.randn(3, 8, 8, dtype=dtype)])
    assert packed.dtype == dtype


@pytest.mark.parametrize("variant", [dict(), dict(position="sincos-2d"), dict(position="none", pool="mean")], ids=str)
def test_autocast_keeps_the_residual_stream_in_full_precision(variant: dict[str, Any]) -> None:
    model = small_model(**variant)
    images = torch.randn(2, 3, 24, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x, _ = model.embed(images)
        logits = model(images)
    assert x.dtype == torch.float32
    torch.testing.assert_close(logits.float(), model(images), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_checkpointing_changes_memory_only(packed: bool) -> None:
    model = small_model(depth=4).train()
    images: Any = [torch.randn(3, 16, 16), torch.randn(3, 8, 8)] if packed else torch.randn(2, 3, 16, 16)

    def run_once() -> tuple[torch.Tensor, list[torch.Tensor], int]:
        kept = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            logits = model(images)
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        return logits, list(gradients), kept

    plain, plain_gradients, plain_kept = run_once()
    model.gradient_checkpointing = True
    saved, saved_gradients, saved_kept = run_once()
    assert torch.equal(plain, saved)
    assert all(torch.equal(a, b) for a, b in zip(plain_gradients, saved_gradients, strict=True))
    assert saved_kept < plain_kept / 3


def test_gradient_checkpointing_repeats_its_dropout() -> None:
    model = small_model(dropout=0.2, drop_path=0.2).train()
    model.gradient_checkpointing = True
    images = torch.randn(2, 3, 16, 16, dtype=torch.float32)
    torch.manual_seed(3)
    expected = torch.autograd.grad(model(images).sum(), model.head.weight)[0]
    model.gradient_checkpointing = False
    torch.manual_seed(3)
    assert torch.equal(torch.autograd.grad(model(images).sum(), model.head.weight)[0], expected)
