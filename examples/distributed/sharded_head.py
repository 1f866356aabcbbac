"""A language model whose head is split over two processes has the same losses.

    python examples/distributed/sharded_head.py

Each process has the whole body and half of the classes, which are pairs of bytes. Both
compute the same loss. The text is that of the demo: the source of Python's standard
library.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import monoidreduce as mr
from monoidreduce.demo.data import batches, read_text

RANKS, STEPS, WIDTH, CLASSES = 2, 8, 32, 1 << 16


class Model(nn.Module):
    """Predicts the next two bytes from the two before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.body = mr.nn.MLP(WIDTH, 4 * WIDTH)
        self.head = mr.nn.LinearCrossEntropyHead(WIDTH, CLASSES, label_smoothing=0.1)

    def forward(self, pairs: Tensor, following: Tensor) -> Tensor:
        loss: Tensor = self.head(self.body(self.embedding(pairs)), following)
        return loss


def train(mesh: dist.DeviceMesh | None) -> list[float]:
    """The losses of each step, with the head split over a mesh or whole."""
    torch.manual_seed(0)
    model = Model().double()
    if mesh is not None:
        parallelize_module(model.head, mesh, mr.distributed.VocabParallel())
    # foreach takes no DTensors beside tensors.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for tokens, _ in batches(read_text(None), STEPS, 4, 64, seed=1):
        pairs = 256 * tokens[:, 0::2] + tokens[:, 1::2]
        loss = model(pairs[:, :-1], pairs[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def of_rank(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    losses = train(init_device_mesh("cpu", (RANKS,)))
    Path(folder, f"losses{rank}").write_text(" ".join(loss.hex() for loss in losses))
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (folder,), nprocs=RANKS)
        found = [
            Path(folder, f"losses{rank}").read_text().split() for rank in range(RANKS)
        ]
    alone = train(None)
    same = all(losses == found[0] for losses in found)
    print(f"{RANKS} processes have the same losses: {same}")
    split = [float.fromhex(loss) for loss in found[0]]
    for step, (one, two) in enumerate(zip(alone, split, strict=True)):
        print(f"step {step}: loss {one:.6f} in one process, {two:.6f} in {RANKS}")
    difference = max(abs(a - b) / abs(a) for a, b in zip(alone, split, strict=True))
    print(f"largest relative difference {difference:.1e}")


if __name__ == "__main__":
    main()
