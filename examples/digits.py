"""A residual network in half precision on scikit-learn's handwritten digits, beside the same network in plain PyTorch float32.

Weights are kept twice, as one does in half precision: in float32 by the optimizer, which adds steps too small for a half
number to show, and in float16 by the network, copied after each step. Batch-norm parameters and statistics stay float32.
The gradient of the loss is scaled by 1024, so that small ones do not vanish below float16's smallest number.

    python examples/digits.py

Seeded. The candidates are chosen by measuring before training (`tensorlogic.tune`), so another run may choose others and
round differently; under a lockfile it would not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import tensorlogic

WIDTH, BLOCKS, CLASSES = 256, 2, 10
EPOCHS, BATCH, RATE, DROP, SMOOTHING = 30, 96, 2e-3, 0.1, 0.1
SCALE = 1024.0
Weights = dict[str, Tensor]
Network = Callable[[Weights, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a training run ends with: test accuracy, last loss, seconds of training."""

    accuracy: float
    loss: float
    seconds: float


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 pixels in [0, 1], and their labels."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits() -> Digits:
    """scikit-learn's 1797 digits, a quarter of them for the test."""
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(
        images / 16, labels, test_size=0.25, random_state=0, stratify=labels
    )
    return Digits(
        torch.tensor(x, dtype=torch.float32), torch.tensor(y), torch.tensor(test_x, dtype=torch.float32), torch.tensor(test_y)
    )  # fmt: skip


def shifted(x: Tensor, generator: torch.Generator) -> Tensor:
    """The images [N, 64], each moved by up to one pixel in both directions: more to learn from."""
    padded = F.pad(x.view(-1, 8, 8), (1, 1, 1, 1))
    moves = torch.randint(3, (2, len(x), 1), generator=generator)
    rows, columns = (moves + torch.arange(8)).unbind()
    return padded[
        torch.arange(len(x)).view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)
    ].flatten(1)


def weights() -> Weights:
    """Float32 weights and statistics of the network, from PyTorch's default generator."""

    def linear(name: str, k: int, n: int) -> Weights:
        return {f"{name}.w": torch.randn(n, k) * (2 / k) ** 0.5, f"{name}.b": torch.zeros(n)}

    def norm(name: str) -> Weights:
        return {f"{name}.gamma": torch.ones(WIDTH), f"{name}.beta": torch.zeros(WIDTH)}

    made = linear("stem", 64, WIDTH)
    for i in range(BLOCKS):
        made |= linear(f"{i}.in", WIDTH, WIDTH) | norm(f"{i}.bn") | linear(f"{i}.out", WIDTH, WIDTH)
        made[f"{i}.out.w"] *= 0.1  # a block begins near the identity
        made |= {f"{i}.bn.mean": torch.zeros(WIDTH), f"{i}.bn.var": torch.ones(WIDTH)}
    return made | norm("ln") | linear("neck", WIDTH, WIDTH) | linear("head", WIDTH, CLASSES)


def fused(w: Weights, x: Tensor, training: bool) -> Tensor:
    """The network by TensorLogic's ops: one call for each product with all that surrounds it."""
    h = tensorlogic.linear(x, w["stem.w"], w["stem.b"], activation="relu")
    for i in range(BLOCKS):
        bn = (w[f"{i}.bn.mean"], w[f"{i}.bn.var"], w[f"{i}.bn.gamma"], w[f"{i}.bn.beta"])
        inner = tensorlogic.linear_batch_norm_relu(
            h, w[f"{i}.in.w"], w[f"{i}.in.b"], *bn, training=training
        )
        h = tensorlogic.linear_residual_relu(inner, w[f"{i}.out.w"], w[f"{i}.out.b"], h)
    h = tensorlogic.layer_norm_linear(h, w["ln.gamma"], w["ln.beta"], w["neck.w"], w["neck.b"])
    return tensorlogic.dropout_linear(h, w["head.w"], w["head.b"], p=DROP, training=training)


def plain(w: Weights, x: Tensor, training: bool) -> Tensor:
    """The same network as PyTorch spells it."""
    h = F.relu(F.linear(x, w["stem.w"], w["stem.b"]))
    for i in range(BLOCKS):
        bn = (w[f"{i}.bn.mean"], w[f"{i}.bn.var"], w[f"{i}.bn.gamma"], w[f"{i}.bn.beta"])
        inner = F.relu(
            F.batch_norm(F.linear(h, w[f"{i}.in.w"], w[f"{i}.in.b"]), *bn, training=training)
        )
        h = F.relu(F.linear(inner, w[f"{i}.out.w"], w[f"{i}.out.b"]) + h)
    h = F.linear(F.layer_norm(h, (WIDTH,), w["ln.gamma"], w["ln.beta"]), w["neck.w"], w["neck.b"])
    return F.linear(F.dropout(h, DROP, training), w["head.w"], w["head.b"])


class Copies:
    """Float32 weights for the optimizer, and what the network computes with: copies in `dtype`, batch norm's as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        made = weights()
        self.masters = {
            n: t.requires_grad_() for n, t in made.items() if not n.endswith(("mean", "var"))
        }
        self.leaves = dict(made)
        for name, master in self.masters.items():
            kind = torch.float32 if ".bn." in name else dtype
            self.leaves[name] = torch.nn.Parameter(master.detach().to(kind, copy=True))

    def take_gradients(self, scale: float) -> None:
        """The network's gradients become the optimizer's, in float32 and unscaled."""
        for name, master in self.masters.items():
            grad = self.leaves[name].grad
            assert grad is not None
            master.grad, self.leaves[name].grad = grad.float() / scale, None

    @torch.no_grad()
    def give_weights(self) -> None:
        """The optimizer's weights become the network's."""
        for name, master in self.masters.items():
            self.leaves[name].copy_(master)


def train(
    network: Network, loss_of: Callable[..., Tensor], dtype: torch.dtype, data: Digits
) -> Outcome:
    """Train by AdamW with a cosine schedule; accuracy is counted on images that were never trained on."""
    torch.manual_seed(0)
    copies, order = Copies(dtype), torch.Generator().manual_seed(1)
    scale = SCALE if dtype == torch.float16 else 1.0
    optimizer = torch.optim.AdamW(copies.masters.values(), lr=RATE, weight_decay=0.02, fused=True)
    steps = EPOCHS * (len(data.x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    begin = time.perf_counter()
    loss = torch.zeros(())
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(data.x), generator=order).split(BATCH)[
            : len(data.x) // BATCH
        ]:
            x = shifted(data.x[batch], order).to(dtype)
            loss = loss_of(
                network(copies.leaves, x, True), data.y[batch], label_smoothing=SMOOTHING
            )
            loss.backward(torch.full_like(loss, scale))
            copies.take_gradients(scale)
            optimizer.step()
            schedule.step()
            copies.give_weights()
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        right = network(copies.leaves, data.test_x.to(dtype), False).argmax(1) == data.test_y
    return Outcome(right.float().mean().item(), loss.item(), seconds)


def tune(data: Digits) -> str:
    """Measure every key that training and the test meet, forward and backward; returns what was learned."""

    def everything() -> Tensor:
        w = Copies(torch.float16).leaves
        x = data.x[:BATCH].half()
        with torch.no_grad():
            fused(w, data.test_x.half(), False)
        return tensorlogic.softmax_cross_entropy(
            fused(w, x, True), data.y[:BATCH], label_smoothing=SMOOTHING
        )

    return str(tensorlogic.tune(everything))


def compare() -> tuple[Outcome, Outcome]:
    """Train both; returns (ours in float16, plain PyTorch in float32) and prints them."""
    data, threads = digits(), torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small gain nothing from more
    try:
        print(f"tuning: {tune(data)}")
        with tensorlogic.policy(tune="off"):
            ours = train(fused, tensorlogic.softmax_cross_entropy, torch.float16, data)
        theirs = train(plain, F.cross_entropy, torch.float32, data)
    finally:
        torch.set_num_threads(threads)
    for name, o in (("TensorLogic, float16", ours), ("PyTorch, float32", theirs)):
        print(
            f"{name:<22} test accuracy {100 * o.accuracy:.2f} %  "
            f"last loss {o.loss:.4f}  {o.seconds:.2f} s"
        )
    return ours, theirs


if __name__ == "__main__":
    compare()
