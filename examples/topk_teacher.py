"""Distils a head from a teacher's stored top-k log-probabilities.

The teacher runs once. What is stored of it are k classes and log-probabilities of each
token, instead of logits of the whole vocabulary. They are soft targets of the student.
"""

import torch
from compare import compare
from torch import Tensor

import monoidreduce as mr

TOKENS, CLASSES, WIDTH, K = 128, 1000, 16, 32


def fused(hidden: Tensor, weight: Tensor, index: Tensor, log_probs: Tensor) -> Tensor:
    """The part that the k classes have in each token's divergence from the teacher."""
    p = log_probs.exp()
    cross_entropy = mr.linear_cross_entropy(
        hidden, weight, index, target_probs=p, reduction="none"
    )
    return cross_entropy + (p * log_probs).sum(1)


def plain(hidden: Tensor, weight: Tensor, index: Tensor, log_probs: Tensor) -> Tensor:
    of_student = (hidden @ weight.T).log_softmax(1).gather(1, index)
    return (log_probs.exp() * (log_probs - of_student)).sum(1)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    hidden, teacher = torch.randn(TOKENS, WIDTH), torch.randn(CLASSES, WIDTH)
    stored = mr.linear_topk(hidden, teacher, K)
    share = stored.log_probs.exp().sum(1).mean()
    print(f"{K} of {CLASSES} classes have {share:.0%} of the teacher's probability")

    student = torch.randn(CLASSES, WIDTH)
    inputs = {
        "hidden": hidden,
        "weight": student,
        "index": stored.index,
        "log_probs": stored.log_probs,
    }
    compare(fused, plain, inputs)

    student.requires_grad_()
    optimizer = torch.optim.Adam([student], lr=0.1)
    for step in range(101):
        loss = fused(hidden, student, stored.index, stored.log_probs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(
                f"step {step}: the k classes' part of the divergence {loss.item():.3f}"
            )
    whole = mr.linear_distillation(hidden, student, hidden, teacher, loss="forward_kl")
    print(f"divergence from the teacher over all classes: {whole.item():.3f}")
