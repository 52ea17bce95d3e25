"""Serve timm with LitServe's dynamic batching, in a module of its own: LitServe pickles the class for its workers."""

import io
from pathlib import Path
from typing import Any

import litserve
import torch
from fastapi import Request
from PIL import Image

import vitral
from benchmarks.peers import in_timm, repair_torchvision

WAIT = 0.01
"""Seconds that LitServe waits for a batch to fill."""


class Classifier(litserve.LitAPI):
    """timm's network behind LitServe."""

    def __init__(self, path: Path, **options: Any):
        super().__init__(**options)
        self.path = path

    def setup(self, device: str) -> None:
        repair_torchvision()
        from timm.data.transforms_factory import create_transform

        model = vitral.load(self.path).model
        assert isinstance(model, vitral.ViT)
        self.model = in_timm(model).eval()
        self.transform: Any = create_transform((3, 224, 224), mean=(0.5,) * 3, std=(0.5,) * 3)

    def decode_request(self, request: Request, **_: Any) -> torch.Tensor:
        form: Any = request  # LitServe has read it
        return self.transform(Image.open(io.BytesIO(form["image"].file.read())).convert("RGB"))

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    def predict(self, x: torch.Tensor, **_: Any) -> Any:
        with torch.inference_mode():
            return self.model(x).softmax(1).topk(5)

    def unbatch(self, output: Any) -> list[Any]:  # type: ignore[override]
        return list(zip(output.values.tolist(), output.indices.tolist(), strict=True))

    def encode_response(self, output: Any, **_: Any) -> dict[str, Any]:
        return {"probabilities": output[0], "labels": output[1]}


def run_litserve(path: Path, port: int, *, batch: int) -> None:
    """Run the server until it is stopped."""
    api = Classifier(path, max_batch_size=batch, batch_timeout=WAIT)
    server = litserve.LitServer(api, accelerator="cpu", timeout=60)
    server.run(port=port, host="127.0.0.1", log_level="error", generate_client_file=False)
