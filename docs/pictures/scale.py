"""Draw docs/pictures/scale.png: how memory, traffic and predicted speed grow with devices and model size.

Every curve is computed by vitral.scaling, as `vitral plan` prints it.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from vitral.model.config import ViTConfig
from vitral.model.sizes import named_config
from vitral.planning import LARGE
from vitral.scaling.communication import bytes_per_step
from vitral.scaling.hardware import DEVICES
from vitral.scaling.memory import Parallel, Setup, estimate_memory
from vitral.scaling.simulation import predict

BATCH, COUNTS = 32, [2**power for power in range(11)]
MODELS = {
    "S/16": "vit-s16",
    "B/16": "vit-b16",
    "L/16": "vit-l16",
    "H/14": "vit-h14",
    "g/14": "vit-g14",
    "G/14": "vit-G14",
}
WAYS: tuple[tuple[str, Parallel, bool], ...] = (
    ("DDP", "ddp", False),
    ("FSDP", "fsdp", False),
    ("FSDP + checkpointing", "fsdp", True),
)


def main() -> None:
    configs = {label: named_config(name) for label, name in MODELS.items()}
    configs |= {"22B": ViTConfig(**LARGE["vit-22b14"])}
    figure, (memory, traffic, speed) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for label, parallel, checkpointing in WAYS:
        setup = Setup(parallel=parallel, devices=64, precision="bfloat16", checkpointing=checkpointing)
        values = [estimate_memory(config, setup, BATCH).peak / 2**30 for config in configs.values()]
        memory.plot(list(configs), values, "o-", label=label)
    memory.axhline(80, color="gray", linestyle=":")
    memory.set(title="Memory per device, 64 devices, 32 images each", ylabel="GiB", yscale="log")
    memory.legend(frameon=False)
    for parallel in ("ddp", "fsdp"):
        setup = Setup(parallel=parallel, devices=64, precision="bfloat16")
        values = [bytes_per_step(config, setup).sent / 2**30 for config in configs.values()]
        traffic.plot(list(configs), values, "o-" if parallel == "ddp" else "s--", label=parallel.upper())
    traffic.set(title="Sent per device and step", ylabel="GiB", yscale="log")
    traffic.legend(frameon=False)
    for label, parallel in (("B/16", "ddp"), ("L/16", "ddp"), ("g/14", "ddp"), ("g/14", "fsdp"), ("22B", "fsdp")):
        checkpointing = label == "22B"
        setups = (
            Setup(parallel=parallel, devices=n, precision="bfloat16", checkpointing=checkpointing) for n in COUNTS
        )
        values = [100 * predict(configs[label], setup, DEVICES["h100"], BATCH).efficiency for setup in setups]
        speed.plot(COUNTS, [value / values[0] * 100 for value in values], "o-", label=f"{label}, {parallel.upper()}")
    speed.set(title="Predicted speed per device, H100", xlabel="devices", ylabel="% of one device", xscale="log")
    speed.set_ylim(0, 105)
    speed.legend(frameon=False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
