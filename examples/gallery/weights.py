"""Attention and its relatives: means and sums of values."""

import math

import torch

import monoidreduce as mr


# --8<-- [start:attention]
@mr.statistics
def attend(score, row, column, v):
    capped = 30.0 * torch.tanh(score / 30.0)
    near = torch.where(column <= row, capped - 0.1 * (row - column), -math.inf)
    p = mr.stat.softmax(near)
    return dict(out=p.mean(v), lse=p.logsumexp)


def attention(q, k, v):
    """Causal attention, soft cap (Gemma Team, 2024) and ALiBi (Press et al., 2022).

    q: [N, D]. k: [M, D]. v: [M, E]. Returns out [N, E] and the log-sum-exp [N].
    """
    return attend(q, k, column={"v": v}, scale=q.shape[-1] ** -0.5)
    # --8<-- [end:attention]


# --8<-- [start:hopfield]
@mr.statistics
def recall(score, pattern):
    p = mr.stat.softmax(score)
    return dict(state=p.mean(pattern), lse=p.logsumexp)


def hopfield(state, pattern, beta=4.0, steps=3):
    """[N, D] states after retrieval, and their energies (Ramsauer et al., 2021)."""
    for _ in range(steps):
        state = recall(state, pattern, column={"pattern": pattern}, scale=beta).state
    lse = recall(state, pattern, column={"pattern": pattern}, scale=beta).lse
    return state, 0.5 * state.square().sum(1) - lse / beta
    # --8<-- [end:hopfield]


# --8<-- [start:retention]
@mr.statistics
def retain(score, row, column, log_decay, v):
    seen = column <= row
    decay = torch.exp(log_decay * torch.where(seen, row - column, 0))
    return dict(sum=mr.stat.total(torch.where(seen, score * decay, 0.0) * v))


def retention(q, k, v, log_decay):
    """[N, E] retention (Sun et al., 2023): sum_j decay^(i - j) <q_i, k_j> v_j, j <= i.

    log_decay: [N] or a learned [] that is expanded.
    """
    row = {"log_decay": log_decay.expand(len(q))}
    return retain(q, k, row=row, column={"v": v}).sum
    # --8<-- [end:retention]


# --8<-- [start:slots]
@mr.statistics
def over_slots(score):
    return dict(lse=mr.stat.softmax(score).logsumexp)


@mr.statistics
def over_inputs(score, lse, v):
    p = mr.stat.softmax(score - lse)
    return dict(mean=p.mean(v))


def slots(slot, key, value):
    """[S, E] new slots (Locatello et al., 2020): inputs choose among slots, by a
    softmax along the other axis; slots average the inputs.
    """
    scale = slot.shape[-1] ** -0.5
    lse = over_slots(key, slot, scale=scale).lse
    return over_inputs(slot, key, column={"lse": lse, "v": value}, scale=scale).mean
    # --8<-- [end:slots]


# --8<-- [start:differential]
@mr.statistics
def two_attentions(score, other, row, column, v):
    first = mr.stat.softmax(torch.where(column <= row, score, -math.inf))
    second = mr.stat.softmax(torch.where(column <= row, other, -math.inf))
    return dict(first=first.mean(v), second=second.mean(v))


def differential_attention(q, k, other_q, other_k, v, weight=0.5):
    """[N, E] the difference of two causal attentions (Ye et al., 2024)."""
    scale = q.shape[-1] ** -0.5
    s = two_attentions(q, k, other_q, other_k, column={"v": v}, scale=scale)
    return s.first - weight * s.second
    # --8<-- [end:differential]
