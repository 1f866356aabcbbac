"""Trains a small policy by GRPO. Its sampler keeps few classes, and so does its loss.

The sampler draws from the top-p part of the top 16. The trainer gets the kept classes
as words of bits. Its log-probabilities are those of the distribution that was sampled.
The task: say even and odd numbers in turn.
"""

import torch
from compare import compare
from torch import Tensor, nn

import monoidreduce as mr

CLASSES, WIDTH, LENGTH, PROMPTS, GROUP = 128, 32, 8, 16, 8


class Policy(nn.Module):
    """The state after a token, from the token alone, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )
        self.head = nn.Parameter(0.1 * torch.randn(CLASSES, WIDTH))

    def forward(self, token: Tensor) -> Tensor:
        state: Tensor = self.layers(self.embedding(token))
        return state


def kept_classes(hidden: Tensor, head: Tensor) -> Tensor:
    """Top-p 0.9 of the top 16, as words: what an engine of inference hands over."""
    best = mr.linear_topk(hidden, head, 16)
    before = best.log_probs.softmax(1).cumsum(1) - best.log_probs.softmax(1)
    index = torch.where(before < 0.9, best.index, -1)
    return mr.pack_classes(index, CLASSES)


@torch.no_grad()
def sample(policy: Policy, prompt: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Inputs, tokens, log-probabilities and kept classes of responses, [LENGTH, N]."""
    steps, token = [], prompt
    for step in range(LENGTH):
        hidden = policy(token)
        kept = kept_classes(hidden, policy.head)
        drawn = mr.linear_sample(
            hidden, policy.head, kept=kept, seed=seed * LENGTH + step
        )
        steps.append((token, drawn.index, drawn.log_prob, kept))
        token = drawn.index
    return tuple(map(torch.stack, zip(*steps, strict=True)))


def objective(
    hidden: Tensor, head: Tensor, token: Tensor, kept: Tensor, old: Tensor, gain: Tensor
) -> Tensor:
    found = mr.linear_log_probs(hidden, head, token, kept=kept, entropy=True)
    assert found.entropy is not None
    return clipped(found.log_probs, found.entropy, old, gain)


def plain(
    hidden: Tensor, head: Tensor, token: Tensor, kept: Tensor, old: Tensor, gain: Tensor
) -> Tensor:
    c = torch.arange(len(head))
    keeps = (kept[..., c // 32] >> c % 32 & 1).bool()
    log_p = (hidden @ head.T).masked_fill(~keeps, -torch.inf).log_softmax(-1)
    log_p = log_p.masked_fill(~keeps, 0)
    entropy = -torch.where(keeps, log_p.exp() * log_p, 0).sum(-1)
    return clipped(log_p.gather(-1, token[..., None])[..., 0], entropy, old, gain)


def clipped(log_prob: Tensor, entropy: Tensor, old: Tensor, gain: Tensor) -> Tensor:
    ratio = (log_prob - old).exp()
    worth = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -worth - 0.01 * entropy


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for step in range(61):
        prompt = torch.randint(CLASSES, (PROMPTS,)).repeat_interleave(GROUP)
        given, token, old, kept = sample(policy, prompt, step)
        reward = ((token + given) % 2).double()
        of_group = reward.sum(0).view(PROMPTS, GROUP)
        gain = of_group - of_group.mean(1, keepdim=True)
        gain = (
            (gain / (of_group.std(1, keepdim=True) + 0.1)).flatten().expand(LENGTH, -1)
        )
        if step == 0:
            hidden = policy(given).detach()
            head = policy.head.detach()
            inputs = {"hidden": hidden, "head": head, "token": token, "kept": kept}
            compare(objective, plain, inputs | {"old": old, "gain": gain})
        for _ in range(2):
            loss = objective(policy(given), policy.head, token, kept, old, gain)
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: {reward.mean():.0%} of the tokens are right")
