"""Train a model of vitral in a plain PyTorch loop, then save it with its preprocessing and labels.

python examples/own_loop.py
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import vitral
import vitral.data

EPOCHS, PEAK_LR = 5, 4e-3


def main() -> None:
    torch.manual_seed(0)
    preprocess = vitral.Preprocess(size=(28, 28), channels=1, mean=(0.13,), std=(0.3,))
    load = partial(vitral.data.loader, "builtin:digits", preprocess=preprocess, batch_size=50)
    train_batches, test_batches = load("train"), load("test")

    fields: dict[str, Any] = dict(width=64, depth=2, heads=4, mlp_width=128, pool="mean")
    model = vitral.create("vit-pico7", channels=1, num_classes=len(train_batches.classes), **fields)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=PEAK_LR, weight_decay=0.05))  # biases do not decay
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=EPOCHS * len(train_batches))
    for epoch in range(EPOCHS):
        model.train()
        losses: list[float] = []
        for images, labels in train_batches:  # normalized (50, 1, 28, 28) and (50,)
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
        accuracy = measure_accuracy(model, test_batches)
        print(f"epoch {epoch + 1}  train loss {sum(losses) / len(losses):.3f}  test accuracy {accuracy:.1%}")

    checkpoint = vitral.Checkpoint(model=model, preprocess=preprocess, labels=train_batches.classes)
    vitral.save(checkpoint, "digits.safetensors")
    print("Saved. Try: vitral evaluate digits.safetensors builtin:digits")


@torch.inference_mode()
def measure_accuracy(model: vitral.ViT, batches: Iterable[tuple[Any, Tensor]]) -> float:
    model.eval()
    correct = [model(images).argmax(dim=1) == labels for images, labels in batches]
    return torch.cat(correct).double().mean().item()


if __name__ == "__main__":
    main()
