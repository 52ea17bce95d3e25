"""FSDP2 trains as DDP and a single process do, bit for bit, and every strategy resumes the states of the others."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import vitral
from benchmarks.reference_weights import hash_weights, write_folder
from tests.faults.figures import record
from tests.training.test_parallel import NETWORK, RANDOM, SETTINGS, TORCHRUN, interrupt, run
from vitral.errors import ConfigError
from vitral.model.cost import FLOAT_BYTES
from vitral.model.sizes import named_config
from vitral.training.auto import _CHOICES  # pyright: ignore[reportPrivateUsage]
from vitral.training.config import ResolvedConfig, ResolvedOptim, TrainConfig
from vitral.training.gradients import clip_gradients
from vitral.training.sharding import check_shardable, initialize_shards
from vitral.weights.state_dict import build_on_meta

SHARDED = ["--parallel", "fsdp"]
CASES = {
    "random": [*NETWORK, *RANDOM],
    "bfloat16": [*NETWORK, "--precision", "bfloat16", "--gradient_checkpointing", "true"],
    "masked-patches": [*NETWORK, "--objective", "masked-patches"],
    "bit": ["--recipe", "none", "--model", "bit-r50x1", "--image-size", "32", "--optim.name", "sgd"],
    "probe, then all": ["--from", "BASE", "--tune", "all", "--ema", "0.9"],
    "no probe": ["--from", "BASE", "--tune", "all", "--tune.probe", "false"],
    "lora": ["--from", "BASE", "--tune", "lora"],
    "last blocks": ["--from", "BASE", "--tune", "last-blocks", "--tune.blocks", "1"],
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("sharding") / "photos")


def overlays_of(run: Path) -> dict[str, bytes]:
    """Return the maps of relevance in the report of a run."""
    return {path.name: path.read_bytes() for path in (run / "plots").glob("relevance-*")}


def assert_equal_strategies(case: str, photos: Path, folder: Path) -> None:
    """Train with one process, with DDP and with FSDP2, and compare the weights and the scores."""
    options = CASES[case]
    if "BASE" in options:
        done = run("train", photos, *SETTINGS, *NETWORK, "--steps", "4", "--out", folder / "base")
        assert done.returncode == 0, done.stderr
        options = [str(folder / "base") if word == "BASE" else word for word in options]
    settings = [word for word in SETTINGS if "--precision" not in options or word not in ("--precision", "float32")]
    words = ["train", photos, *settings, *options, "--steps", "6", "--format", "quiet"]
    outcomes = [
        run(*words, "--accumulate", "2", "--out", folder / "one"),
        run(*words, "--parallel", "ddp", "--out", folder / "ddp", launcher=TORCHRUN),
        run(*words, "--parallel", "fsdp", "--out", folder / "fsdp", launcher=TORCHRUN),
    ]
    assert [done.returncode for done in outcomes] == [0, 0, 0], "".join(done.stderr for done in outcomes)
    assert len({hash_weights(folder / name) for name in ("one", "ddp", "fsdp")}) == 1
    assert len({(folder / name / "metrics.csv").read_text() for name in ("one", "ddp", "fsdp")}) == 1
    assert overlays_of(folder / "one") == overlays_of(folder / "fsdp")
    vitral.load(folder / "fsdp/model.safetensors", verify=True)


def test_sharded_training_equals_one_process(photos: Path, tmp_path: Path) -> None:
    words = ["train", photos, *SETTINGS, *CASES["random"], "--steps", "6", "--format", "quiet"]
    one = run(*words, "--accumulate", "2", "--out", tmp_path / "one")
    two = run(*words, *SHARDED, "--out", tmp_path / "two", launcher=TORCHRUN)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert hash_weights(tmp_path / "one") == hash_weights(tmp_path / "two")
    assert 'parallel = "fsdp"' in (tmp_path / "two/config.toml").read_text()
    vitral.load(tmp_path / "two/model.safetensors", verify=True)
    assert overlays_of(tmp_path / "one") == overlays_of(tmp_path / "two") != {}


@pytest.mark.soak
def test_all_strategies_are_equal(photos: Path, tmp_path: Path) -> None:
    for case in CASES:
        assert_equal_strategies(case, photos, tmp_path / case)
    record(
        "One process with two micro-batches, two ranks of DDP, two of FSDP2",
        "bit-equal; within 1e-5 with clipping",
        f"{len(CASES)} of {len(CASES)} kinds of training bit-equal, with clipping: {', '.join(CASES)}",
    )


@pytest.mark.soak
def test_every_strategy_resumes_the_others(photos: Path, tmp_path: Path) -> None:
    """Start with one strategy, continue with another, and end with the first."""
    words = ["train", photos, *SETTINGS, *CASES["random"], "--steps", "600", "--accumulate", "2", "--format", "quiet"]
    launchers = {"one": None, "ddp": TORCHRUN, "fsdp": TORCHRUN}
    parallel = {"one": "ddp", "ddp": "ddp", "fsdp": "fsdp"}
    whole = run(*words, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    pairs = [(first, second) for first in launchers for second in launchers]
    for first, second in pairs:
        folder = tmp_path / f"{first}-{second}"
        interrupt(folder, *words, "--parallel", parallel[first], "--out", folder, launcher=launchers[first])
        interrupt(folder, "train", "--resume", folder, "--parallel", parallel[second], launcher=launchers[second])
        done = run("train", "--resume", folder, "--parallel", parallel[first], launcher=launchers[first])
        assert done.returncode == 0, done.stderr
        assert hash_weights(folder) == hash_weights(tmp_path / "whole"), f"{first}, {second}, {first}"
    record(
        "Another number of ranks or another strategy after a resume",
        "bit-equal, each sample once per epoch",
        f"{len(pairs)} of {len(pairs)} bit-equal: one process, DDP and FSDP, resumed by each other and back",
    )


# ---- the parts of it ----


def test_the_norm_does_not_depend_on_rows_of_other_tensors() -> None:
    """Equal to torch's own up to rounding, and the same bits however the rows are divided."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((7, 5), (3,), (1, 4), (2, 3, 2, 2))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    expected = torch.nn.utils.get_total_norm(gradients)
    before = [gradient.clone() for gradient in gradients]
    norm = clip_gradients(parameters, 1.0)
    torch.testing.assert_close(norm, expected)
    clipped = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for gradient, original in zip(clipped, before, strict=True):
        torch.testing.assert_close(gradient, original / (expected + 1e-6))


@pytest.mark.parametrize("name", ["vit-ti16", "r26-vit-s32", "bit-r26x1"])
def test_layer_by_layer_initialization_equals_build(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is divided here, so that the values can be compared; they come in the order of creation."""
    monkeypatch.setattr("vitral.training.sharding.shard_block", lambda block, config: None)
    monkeypatch.setattr("vitral.training.sharding.shard_model", lambda model, config: None)
    fields = {"num_classes": 3} | ({} if name.startswith("bit") else {"depth": 2, "width": 96, "heads": 3})
    config = named_config(name, **fields)
    torch.manual_seed(1)
    expected = vitral.create(name, **fields)
    after = torch.rand(1)
    torch.manual_seed(1)
    actual = initialize_shards(build_on_meta(config), ResolvedConfig(data="photos", device="cpu"))
    assert torch.equal(torch.rand(1), after)  # layers that come later draw the same numbers, too
    for name_, tensor in actual.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name_]), name_


def test_settings_that_need_whole_matrices_are_refused() -> None:
    with pytest.raises(ConfigError, match="muon"):
        check_shardable(ResolvedConfig(data="photos", parallel="fsdp", optim=ResolvedOptim(name="muon")))
    with pytest.raises(ConfigError, match="compile"):
        check_shardable(ResolvedConfig(data="photos", parallel="fsdp", compile=True))


def test_one_process_needs_no_strategy() -> None:
    assert "RANK" not in os.environ
    assert _CHOICES["parallel"](TrainConfig(data="photos"), None) == ("ddp", "")  # type: ignore[arg-type]


def test_the_plan_for_a_large_model() -> None:
    """G on the meta device: each of 64 processes holds a 64th of every matrix, and at most one block as a whole."""
    model = build_on_meta(named_config("vit-G14", num_classes=1000))
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters > 1.8e9
    assert all(p.is_meta for p in model.parameters())
    shares = [sum(rows_per_process(p.shape, 64) for p in model.parameters())]
    block = max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    rest = parameters - sum(p.numel() for block in model.blocks for p in block.parameters())
    assert shares[0] < 1.02 * parameters / 64
    assert block + rest < 0.1 * parameters  # what is gathered at a time
    assert 4 * FLOAT_BYTES * shares[0] + FLOAT_BYTES * (2 * block + rest) < 2**30


def rows_per_process(shape: torch.Size, world: int) -> int:
    return -(-shape[0] // world) * shape[1:].numel()
