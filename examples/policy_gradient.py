"""Log-probabilities, entropy and most likely token, as reinforcement learning needs.

PPO's loss is made of them by ordinary torch, of numbers of tokens. Logits are not
stored.
"""

from typing import Any

import torch
from compare import compare, compare_memory
from torch import Tensor

import monoidreduce as mr


@mr.statistics
def token_stats(score: Tensor, column: Tensor, label: Tensor) -> dict[str, Any]:
    p = mr.stat.softmax(score)
    target = mr.stat.total(torch.where(column == label, score, 0.0))
    return dict(
        lse=p.logsumexp, entropy=p.entropy, target=target, best=mr.stat.largest(score)
    )


def ppo(log_prob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantage, clipped * advantage) - 0.01 * entropy


def fused(
    hidden: Tensor, weight: Tensor, token: Tensor, old: Tensor, advantage: Tensor
) -> Tensor:
    s = token_stats(hidden, weight, label=token)
    return ppo(s.target - s.lse, s.entropy, old, advantage)


def plain(
    hidden: Tensor, weight: Tensor, token: Tensor, old: Tensor, advantage: Tensor
) -> Tensor:
    log_p = (hidden @ weight.T).log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    return ppo(log_p.gather(1, token[:, None]).squeeze(1), entropy, old, advantage)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    hidden, weight = torch.randn(256, 32), torch.randn(8000, 32)
    token = torch.randint(8000, (256,))
    log_probs = (hidden @ weight.T).log_softmax(1)
    old = log_probs.gather(1, token[:, None]).squeeze(1) + 0.2 * torch.randn(256)
    inputs = {
        "hidden": hidden,
        "weight": weight,
        "token": token,
        "old": old,
        "advantage": torch.randn(256),
    }
    compare(fused, plain, inputs)
    compare_memory(fused, plain, inputs)
    best = token_stats(hidden, weight, label=token).best
    accuracy = (best.index == token).double().mean()
    print(f"the most likely token was the one that was taken in {accuracy:.1%}")
