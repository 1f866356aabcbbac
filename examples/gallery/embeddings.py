"""Contrastive, metric and ranking losses: folds over the other members of a batch."""

import math

import torch
import torch.nn.functional as F

import monoidreduce as mr


# --8<-- [start:clip]
@mr.statistics
def choice(score, row, column):
    match = mr.stat.total(torch.where(row == column, score, 0.0))
    return dict(lse=mr.stat.softmax(score).logsumexp, match=match)


def clip(image, text, scale):
    """InfoNCE (van den Oord et al., 2018) both ways, as CLIP (Radford et al., 2021).

    image, text: [N, D], of length 1. scale: [], learned.
    """
    by_image, by_text = choice(scale * image, text), choice(scale * text, image)
    return sum((s.lse - s.match).mean() for s in (by_image, by_text)) / 2
    # --8<-- [end:clip]


# --8<-- [start:siglip]
def siglip(image, text, scale, bias):
    """SigLIP's loss of all pairs (Zhai et al., 2023). scale, bias: [], learned."""

    @mr.statistics
    def pairs(score, row, column):
        logit = score + bias
        loss = F.softplus(torch.where(row == column, -logit, logit))
        return dict(loss=mr.stat.total(loss))

    return pairs(scale * image, text).loss.mean()
    # --8<-- [end:siglip]


# --8<-- [start:supcon]
@mr.statistics
def same_class(score, row, column, kind, other_kind):
    others = row != column
    same = others & (kind == other_kind)
    return dict(
        lse=mr.stat.softmax(torch.where(others, score, -math.inf)).logsumexp,
        sum=mr.stat.total(torch.where(same, score, 0.0)),
        number=mr.stat.count(same),
    )


def supcon(x, kind, temperature=0.1):
    """Supervised contrastive loss (Khosla et al., 2020) of x [N, D] and classes [N]."""
    data = {"row": {"kind": kind}, "column": {"other_kind": kind}}
    s = same_class(x, x, **data, scale=1 / temperature)
    has = s.number > 0
    return (s.lse - s.sum / s.number)[has].mean()
    # --8<-- [end:supcon]


# --8<-- [start:hard_negatives]
@mr.statistics
def hard(score, row, column, beta):
    match = mr.stat.total(torch.where(row == column, score, 0.0))
    score = torch.where(row == column, -math.inf, score)
    weight = mr.stat.softmax(beta * score).logsumexp
    weighted = mr.stat.softmax((1 + beta) * score).logsumexp
    return dict(match=match, weight=weight, weighted=weighted)


def hard_negatives(x, y, beta=1.0, temperature=0.5):
    """InfoNCE with negatives weighted by exp(beta score), so that hard ones
    count more (Robinson et al., 2021)."""
    row = {"beta": x.new_full((len(x),), beta)}
    s = hard(x, y, row=row, scale=1 / temperature)
    negatives = math.log(len(y) - 1) + s.weighted - s.weight
    return F.softplus(negatives - s.match).mean()
    # --8<-- [end:hard_negatives]


# --8<-- [start:uniformity]
@mr.statistics
def spread(score, row, column, x2, y2):
    log_weight = torch.where(row == column, -math.inf, 4 * score - 2 * (x2 + y2))
    return dict(lse=mr.stat.softmax(log_weight).logsumexp)


def alignment_and_uniformity(x, y):
    """E |x - y|^2 of pairs, and log E exp(-2 |x - x'|^2) (Wang and Isola, 2020)."""
    squares = x.square().sum(1)
    lse = spread(x, x, row={"x2": squares}, column={"y2": squares}).lse
    pairs = len(x) * (len(x) - 1)
    return (x - y).square().sum(1).mean(), lse.logsumexp(0) - math.log(pairs)
    # --8<-- [end:uniformity]


# --8<-- [start:max_sim]
@mr.statistics
def best(score, keep):
    return dict(best=mr.stat.largest(torch.where(keep, score, -math.inf)))


def max_sim(queries, documents, keep):
    """[P, Q] scores of ColBERT (Khattab and Zaharia, 2020).

    queries: [Q, T, D], their tokens. documents: [P, L, D]. keep: bool [P, L], without
    padding.
    """
    rows = queries.flatten(0, 1).expand(len(documents), -1, -1)
    s = best(rows, documents, column={"keep": keep})
    return s.best.value.unflatten(1, queries.shape[:2]).sum(-1)
    # --8<-- [end:max_sim]


# --8<-- [start:triplet]
@mr.statistics
def hardest(score, x2, y2, kind, other_kind):
    square = x2 + y2 - 2 * score
    same = kind == other_kind
    return dict(
        far=mr.stat.largest(torch.where(same, square, -math.inf)),
        near=mr.stat.smallest(torch.where(same, math.inf, square)),
    )


def triplet(x, kind, margin=0.2):
    """[N] the triplet loss of the hardest pairs (Hermans et al., 2017), of squares."""
    x = x - x.mean(0)
    squares = x.square().sum(1)
    row, column = {"x2": squares, "kind": kind}, {"y2": squares, "other_kind": kind}
    s = hardest(x, x, row=row, column=column)
    return torch.relu(margin + s.far.value - s.near.value)
    # --8<-- [end:triplet]


# --8<-- [start:multi_similarity]
@mr.statistics
def similar(score, row, column, kind, other_kind):
    same = kind == other_kind
    near = torch.where(same & (row != column), -2.0 * (score - 0.5), -math.inf)
    far = torch.where(same, -math.inf, 50.0 * (score - 0.5))
    return dict(
        near=mr.stat.softmax(near).logsumexp, far=mr.stat.softmax(far).logsumexp
    )


def multi_similarity(x, kind):
    """[N] the multi-similarity loss (Wang et al., 2019) of x of length 1."""
    s = similar(x, x, row={"kind": kind}, column={"other_kind": kind})
    return F.softplus(s.near) / 2 + F.softplus(s.far) / 50
    # --8<-- [end:multi_similarity]


# --8<-- [start:circle]
@mr.statistics
def on_circle(score, row, column, kind, other_kind):
    same, margin, gamma = kind == other_kind, 0.25, 80.0
    to_near = torch.relu(1 + margin - score).detach()  # weights, without a gradient
    to_far = torch.relu(score + margin).detach()
    near = -gamma * to_near * (score - 1 + margin)
    far = gamma * to_far * (score - margin)
    near = torch.where(same & (row != column), near, -math.inf)
    far = torch.where(same, -math.inf, far)
    return dict(
        near=mr.stat.softmax(near).logsumexp, far=mr.stat.softmax(far).logsumexp
    )


def circle(x, kind):
    """[N] the circle loss (Sun et al., 2020) of x of length 1."""
    s = on_circle(x, x, row={"kind": kind}, column={"other_kind": kind})
    return F.softplus(s.near + s.far)
    # --8<-- [end:circle]


# --8<-- [start:nca]
@mr.statistics
def stochastic(score, row, column, y2, kind, other_kind):
    log_weight = torch.where(row == column, -math.inf, 2 * score - y2)
    same = torch.where(kind == other_kind, log_weight, -math.inf)
    return dict(
        all=mr.stat.softmax(log_weight).logsumexp,
        same=mr.stat.softmax(same).logsumexp,
    )


def nca(x, kind):
    """[N] log-probabilities that a random neighbour has the same class: neighbourhood
    components analysis (Goldberger et al., 2004).
    """
    column = {"y2": x.square().sum(1), "other_kind": kind}
    s = stochastic(x, x, row={"kind": kind}, column=column)
    return s.same - s.all
    # --8<-- [end:nca]
