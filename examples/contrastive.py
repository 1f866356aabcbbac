"""Losses between images and texts: SigLIP's of all pairs, CLIP's by rows and columns.

The temperature multiplies the images before the call, so it has a gradient; SigLIP's
bias is data of rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from compare import compare, compare_memory
from torch import Tensor

import monoidreduce as mr


@mr.statistics
def pairs(score: Tensor, column: Tensor, label: Tensor, bias: Tensor) -> dict[str, Any]:
    logit = score + bias
    return dict(
        loss=mr.stat.total(F.softplus(torch.where(column == label, -logit, logit)))
    )


@mr.statistics
def choices(score: Tensor, column: Tensor, label: Tensor) -> dict[str, Any]:
    target = mr.stat.total(torch.where(column == label, score, 0.0))
    return dict(lse=mr.stat.softmax(score).logsumexp, target=target)


def fused(image: Tensor, text: Tensor, log_scale: Tensor, bias: Tensor) -> Tensor:
    """[2] SigLIP's loss and CLIP's of N images [N, D] and their texts [N, D]."""
    number, scaled = torch.arange(len(image)), image * log_scale.exp()
    siglip = pairs(
        scaled, text, label=number, row={"bias": bias.expand(len(image))}
    ).loss.mean()
    of_image = choices(scaled, text, label=number)
    of_text = choices(text, scaled, label=number)
    clip = (of_image.lse - of_image.target + of_text.lse - of_text.target).mean() / 2
    return torch.stack([siglip, clip])


def plain(image: Tensor, text: Tensor, log_scale: Tensor, bias: Tensor) -> Tensor:
    number, scores = torch.arange(len(image)), image @ text.T * log_scale.exp()
    sign = 2 * torch.eye(len(image)) - 1
    siglip = -F.logsigmoid(sign * (scores + bias)).sum() / len(image)
    clip = (F.cross_entropy(scores, number) + F.cross_entropy(scores.T, number)) / 2
    return torch.stack([siglip, clip])


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = {
        "image": F.normalize(torch.randn(700, 48), dim=1),
        "text": F.normalize(torch.randn(700, 48), dim=1),
        "log_scale": torch.tensor(2.3),
        "bias": torch.tensor(-5.0),
    }
    compare(fused, plain, inputs)
    compare_memory(fused, plain, inputs)
