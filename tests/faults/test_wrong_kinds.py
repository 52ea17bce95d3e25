"""Pass values of the wrong type to the Python API, without the runtime type checks of the other tests."""

import subprocess
import sys

CASES = [  # a call, and facts that its error states
    ("model(None)", ["tensor", "NoneType"]),
    ("model(numpy.zeros((1, 3, 28, 28)))", ["tensor", "ndarray"]),
    ("model([numpy.zeros((3, 28, 28))])", ["images[0]", "ndarray"]),
    ("model('cat.jpg')", ["tensor", "str"]),
    ("model(image for image in images)", ["tensor", "generator"]),
    ("model(images[0])", ["(3, 28, 28)", "image[None]"]),
    ("model(images.to(torch.uint8))", ["uint8", "images.float() / 127.5 - 1"]),
    ("vitral.create(model.config)", ["ViTConfig", "ViT(config)"]),
    ("vitral.create(16)", ["name", "16"]),
    ("model.features(images, layers='last')", ["no layer 'last'", "0 to 3"]),
    ("model.features(images, layers=['last'])", ["no layer 'last'", "0 to 3"]),
    ("vitral.record_attention(model, layers=9).__enter__()", ["no layer 9", "0 to 3"]),
    ("model.features(images, layers=1.5)", ["no layer 1.5"]),
    ("model.features(images, layers=True)", ["no layer True"]),
    ("vitral.record_attention('vit-b16').__enter__()", ["str", "attention"]),
    ("vitral.ViT('vit-b16')", ["ViTConfig", "vitral.create"]),
    ("vitral.create('vit-pico7', pool=['mean'])", ["pool", "'mean'", "token, mean, token+mean, map, none"]),
    ("vitral.create('vit-pico7', pool=numpy.array(['mean', 'map']))", ["pool", "token, mean, token+mean, map, none"]),
    ("vitral.create('vit-pico7', width=10**9, heads=7)", ["heads=7", "width=1000000000", "heads=8"]),
    ("vitral.create('vit-pico7', dropout=10**400)", ["dropout", "number"]),
    ("vitral.create('vit-pico7', num_classes=10**30)", ["num_classes", "integer"]),
    ("vitral.create('vit-pico7', norm_eps=1e-60)", ["norm_eps", "1e-30"]),
    ("model.config.grid(10**30 + 1, 28)", ["patches of 7 x 7"]),
    ("vitral.load({'head': [images] * 9})", ["state dict", "list"]),
    ("vitral.load(images)", ["path", "state dict"]),
    ("vitral.load(model.state_dict())", ["config="]),
    ("vitral.load(model.state_dict(), config=images)", ["config", "ViTConfig", "Tensor"]),
    ("vitral.load(model.state_dict(), config=model.config, verify='often')", ["verify", "'often'"]),
    ("vitral.save(images, 'x.safetensors')", ["Checkpoint", "Tensor"]),
    ("vitral.save(model, images)", ["path"]),
    ("vitral.convert(images, 'x.safetensors', to='native')", ["path"]),
    ("vitral.convert('vit-cifar10', 'x.safetensors', to='native', precision='int4')", ["precision", "'int4'"]),
    ("vitral.describe(images)", ["path"]),
    ("vitral.Checkpoint(model=model, preprocess=images)", ["preprocess", "Tensor"]),
]
SCRIPT = """
import numpy, torch, vitral
model = vitral.create("vit-pico7")
images = torch.zeros(1, 3, 28, 28)
assert sorted(model.features(images, layers=numpy.arange(2)).layers) == [0, 1]  # NumPy's integers are integers
for call, facts in CASES:
    try:
        eval(call)
    except vitral.VitralError as error:
        for fact in facts:
            assert fact in str(error), (call, fact, str(error))
        assert "\\n" not in str(error), call
        assert len(str(error)) < 600, call
    else:
        raise AssertionError(f"{call} was accepted")
"""


def test_each_raises_one_sentence() -> None:
    script = f"CASES = {CASES!r}\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
