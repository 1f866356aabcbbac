"""How the gradient of a language model's loss moves: its Hessian times a direction.

For sharpness, influence functions and second-order optimizers. It is the derivative in
a direction of the gradient, forward mode of reverse mode. No logits are stored.
"""

import torch
import torch.nn.functional as F
from compare import compare_results
from torch import Tensor

import monoidreduce as mr


def fused(hidden: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    return mr.linear_cross_entropy(hidden, weight, token)


def plain(hidden: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, token)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    point = torch.randn(128, 32), torch.randn(4000, 32)
    direction = torch.randn(128, 32), torch.randn(4000, 32)
    token = torch.randint(4000, (128,))
    products = []
    for loss in (fused, plain):
        gradient = torch.func.grad(loss, (0, 1))
        products.append(
            torch.func.jvp(lambda *x, g=gradient: g(*x, token), point, direction)[1]
        )
    compare_results(("of hidden", "of weight"), *products)
