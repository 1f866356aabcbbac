"""Losses and measures of language models: folds over the classes of a head."""

import math

import torch

import monoidreduce as mr


# --8<-- [start:smoothed]
@mr.statistics
def pieces(score, column, label):
    """Of a token: the log-sum-exp, the target's logit, and the sum of all logits."""
    target = mr.stat.total(torch.where(column == label, score, 0.0))
    lse = mr.stat.softmax(score).logsumexp
    return dict(lse=lse, target=target, sum=mr.stat.total(score))


def smoothed(hidden, head, token, smoothing=0.1, z=1e-4):
    """[N] label smoothing (Szegedy et al., 2016), z-loss (Chowdhery et al., 2022)."""
    s = pieces(hidden, head, label=token)
    of_target, of_all = s.lse - s.target, s.lse - s.sum / len(head)
    return (1 - smoothing) * of_target + smoothing * of_all + z * s.lse**2
    # --8<-- [end:smoothed]


# --8<-- [start:focal]
def focal(hidden, head, token, gamma=2.0):
    """[N] focal loss (Lin et al., 2017): tokens that are predicted well count less."""
    s = pieces(hidden, head, label=token)
    log_p = s.target - s.lse
    return -((-log_p.expm1()) ** gamma) * log_p
    # --8<-- [end:focal]


# --8<-- [start:hinge]
@mr.statistics
def rivals(score, column, label):
    hit = column == label
    target = mr.stat.total(torch.where(hit, score, 0.0))
    rival = mr.stat.largest(torch.where(hit, -math.inf, score))
    return dict(target=target, rival=rival)


def hinge(hidden, head, token, margin=1.0):
    """[N] the multi-class hinge loss (Crammer and Singer, 2001)."""
    s = rivals(hidden, head, label=token)
    return torch.relu(margin + s.rival.value - s.target)
    # --8<-- [end:hinge]


# --8<-- [start:adjusted]
@mr.statistics
def with_prior(score, column, label, log_prior):
    logit = score + log_prior
    target = mr.stat.total(torch.where(column == label, logit, 0.0))
    return dict(lse=mr.stat.softmax(logit).logsumexp, target=target)


def logit_adjusted(hidden, head, token, prior):
    """[N] cross entropy for classes of unequal size, prior [V] (Menon et al., 2021)."""
    s = with_prior(hidden, head, label=token, column={"log_prior": prior.log()})
    return s.lse - s.target
    # --8<-- [end:adjusted]


# --8<-- [start:mixture]
def mixture_of_softmaxes(hidden, head, token, log_mix):
    """[N] loss of sum_k mix_k softmax(hidden_k head^T) (Yang et al., 2018).

    hidden: [N, K, D]. log_mix: [N, K].
    """
    s = pieces(hidden, head, label=token[:, None].expand(log_mix.shape))
    return -(log_mix + s.target - s.lse).logsumexp(-1)
    # --8<-- [end:mixture]


# --8<-- [start:calibration]
@mr.statistics
def prediction(score):
    p = mr.stat.softmax(score)
    return dict(lse=p.logsumexp, entropy=p.entropy, best=mr.stat.largest(score))


def calibration_error(hidden, head, token, bins=15):
    """The expected calibration error (Guo et al., 2017), and the mean entropy."""
    s = prediction(hidden, head)
    confidence, hit = (s.best.value - s.lse).exp(), s.best.index == token
    part = (confidence * bins).long().clamp(0, bins - 1)
    gap = confidence.new_zeros(bins).index_add(0, part, confidence - 1.0 * hit)
    return gap.abs().sum() / len(token), s.entropy.mean()
    # --8<-- [end:calibration]


# --8<-- [start:brier]
@mr.statistics
def squares(score, column, label):
    target = mr.stat.total(torch.where(column == label, score, 0.0))
    p, twice = mr.stat.softmax(score), mr.stat.softmax(2 * score)
    return dict(lse=p.logsumexp, twice=twice.logsumexp, target=target)


def brier(hidden, head, token):
    """[N] sum_c (p_c - [c = token])^2 (Brier, 1950)."""
    s = squares(hidden, head, label=token)
    return (s.twice - 2 * s.lse).exp() - 2 * (s.target - s.lse).exp() + 1
    # --8<-- [end:brier]


# --8<-- [start:rank]
@mr.statistics
def above(score, column, label, target, width):
    rival = column != label
    soft = torch.where(rival, torch.sigmoid((score - target) / width), 0.0)
    return dict(hard=mr.stat.count(rival & (score > target)), soft=mr.stat.total(soft))


def ranks(hidden, head, token, width=0.1):
    """[N] the target's rank among the classes, and a smooth one (Qin et al., 2010).

    Ranks start at 1. 1 / rank is the reciprocal rank, rank <= k a hit of the first k.
    """
    target = (hidden * head[token]).sum(-1)
    data = {"target": target, "width": torch.full_like(target, width)}
    s = above(hidden, head, label=token, row=data)
    return 1 + s.hard, 1 + s.soft
    # --8<-- [end:rank]


# --8<-- [start:sample]
def sample(hidden, head, seed):
    """[N] classes drawn from the softmax, and their log-probabilities: the largest of
    logits with Gumbel noise (Maddison et al., 2014). seed: [], an integer.
    """

    @mr.statistics
    def noisy(score):
        gumbel = -torch.log(-torch.log(mr.stat.uniform(seed)))
        lse = mr.stat.softmax(score).logsumexp
        return dict(best=mr.stat.largest(score + gumbel), lse=lse)

    s = noisy(hidden, head)
    return s.best.index, (hidden * head[s.best.index]).sum(-1) - s.lse
    # --8<-- [end:sample]


# --8<-- [start:dpo]
@mr.statistics
def two_policies(score, other, column, label):
    p, q = mr.stat.softmax(score), mr.stat.softmax(other)
    gap = mr.stat.total(torch.where(column == label, score - other, 0.0))
    return dict(p=p.logsumexp, q=q.logsumexp, gap=gap)


def dpo(hidden, head, ref_hidden, ref_head, token, beta=0.1):
    """[B] preference losses (Rafailov et al., 2023) of chosen and rejected sequences.

    hidden, ref_hidden: [2, B, T, D]. token: [2, B, T], -100 where there is none.
    """
    s = two_policies(hidden, head, ref_hidden, ref_head, label=token)
    log_ratio = torch.where(token == -100, 0.0, s.gap - s.p + s.q).sum(-1)
    return -torch.nn.functional.logsigmoid(beta * (log_ratio[0] - log_ratio[1]))
    # --8<-- [end:dpo]


# --8<-- [start:distillation]
@mr.statistics
def towards(score, other):
    student, teacher = mr.stat.softmax(score), mr.stat.softmax(other)
    gap = teacher.mean(other - score)
    return dict(student=student.logsumexp, teacher=teacher.logsumexp, gap=gap)


def distillation(hidden, head, teacher_hidden, teacher_head, temperature=2.0):
    """[N] T^2 KL(teacher, student) of softened logits (Hinton et al., 2015)."""
    s = towards(hidden, head, teacher_hidden, teacher_head, scale=1 / temperature)
    return temperature**2 * (s.gap - s.teacher + s.student)
    # --8<-- [end:distillation]


# --8<-- [start:jsd]
@mr.statistics
def normalizers(score, other):
    return dict(p=mr.stat.softmax(score).logsumexp, q=mr.stat.softmax(other).logsumexp)


@mr.statistics
def to_mixture(score, other, p_lse, q_lse):
    log_p, log_q = (score - p_lse).detach(), (other - q_lse).detach()
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    p, q = mr.stat.softmax(score), mr.stat.softmax(other)
    return dict(p=p.mean(log_p - log_m), q=q.mean(log_q - log_m))


def jensen_shannon(hidden, head, other_hidden, other_head):
    """[N] divergences of two heads (Lin, 1991), in two passes.

    Gradients by the logarithms add up to 0, so these are detached.
    """
    with torch.no_grad():
        lse = normalizers(hidden, head, other_hidden, other_head)
    row = {"p_lse": lse.p, "q_lse": lse.q}
    s = to_mixture(hidden, head, other_hidden, other_head, row=row)
    return 0.5 * (s.p + s.q)
    # --8<-- [end:jsd]


# --8<-- [start:nearest_tokens]
@mr.statistics
def neighbours(score, x2, y2, value, label):
    log_weight = 2 * score - x2 - y2
    hit = torch.where(value == label, log_weight, -math.inf)
    return dict(
        all=mr.stat.softmax(log_weight).logsumexp,
        hit=mr.stat.softmax(hit).logsumexp,
    )


def nearest_tokens(hidden, stored, value, token):
    """[N] log-probabilities by stored states [M, D] and their tokens [M]: kNN-LM
    (Khandelwal et al., 2020), with all neighbours.
    """
    norms = {"y2": stored.square().sum(1), "value": value}
    row = {"x2": hidden.square().sum(1)}
    s = neighbours(hidden, stored, label=token, row=row, column=norms)
    return s.hit - s.all
    # --8<-- [end:nearest_tokens]
