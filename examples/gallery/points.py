"""Kernels between points: density, regression, clustering and optimal transport."""

import math

import torch

import monoidreduce as mr


# --8<-- [start:squares]
def squares(x, y, **column):
    """The arguments of a call whose function has |x - y|^2 as x2 + y2 - 2 * score.

    x: [N, D]. y: [M, D]. Distances from the centre are shorter, so their squares lose
    fewer digits. column: more data of columns.
    """
    centre = y.mean(0)
    x, y = x - centre, y - centre
    column["y2"] = y.square().sum(1)
    return dict(a=x, b=y, row={"x2": x.square().sum(1)}, column=column)
    # --8<-- [end:squares]


# --8<-- [start:density]
@mr.statistics
def bumps(score, x2, y2):
    return dict(lse=mr.stat.softmax(score - 0.5 * (x2 + y2)).logsumexp)


def log_density(x, sample, width=1.0):
    """[N] log-densities at x of a Gaussian around each of M samples (Parzen, 1962)."""
    lse = bumps(**squares(x / width, sample / width)).lse
    return lse - math.log(len(sample)) - x.shape[1] * math.log(width * math.tau**0.5)
    # --8<-- [end:density]


# --8<-- [start:mean_shift]
@mr.statistics
def gaussian_mean(score, y2, y):
    return dict(mean=mr.stat.softmax(score - 0.5 * y2).mean(y))


def mean_shift(x, y, width=1.0):
    """[N, D] points x moved to the mean of y around them (Comaniciu and Meer, 2002).

    It is also the best denoiser of x = y + width * noise (Karras et al., 2022).
    """
    column = {"y2": y.square().sum(1) / width**2, "y": y}
    return gaussian_mean(x, y, column=column, scale=1 / width**2).mean
    # --8<-- [end:mean_shift]


# --8<-- [start:regression]
@mr.statistics
def weighted(score, x2, y2, value):
    log_weight = score - 0.5 * (x2 + y2)
    return dict(mean=mr.stat.softmax(log_weight).mean(value))


def regression(x, known, value, width=1.0):
    """[N, E] kernel regression (Nadaraya, 1964; Watson, 1964) of values [M, E]."""
    return weighted(**squares(x / width, known / width, value=value)).mean
    # --8<-- [end:regression]


# --8<-- [start:ridge]
@mr.statistics
def laplace(score, x2, y2, row, column, v):
    square = torch.where(row != column, x2 + y2 - 2 * score, 0.0)
    distance = torch.where(square > 0, square, 0.0).sqrt()
    return dict(sum=mr.stat.total(torch.exp(-distance) * v))


def ridge(x, target, penalty=0.1, steps=30):
    """[N, E] coefficients c of kernel ridge regression, (K + penalty) c = target, by
    conjugate gradients: K is not stored.
    """
    c, left, tiny = torch.zeros_like(target), target, torch.finfo(x.dtype).tiny
    direction, square = left, left.square().sum(0)
    for _ in range(steps):
        product = laplace(**squares(x, x, v=direction)).sum + penalty * direction
        step = square / (direction * product).sum(0).clamp(min=tiny)
        c, left = c + step * direction, left - step * product
        before, square = square.clamp(min=tiny), left.square().sum(0)
        direction = left + square / before * direction
    return c
    # --8<-- [end:ridge]


# --8<-- [start:mixture]
@mr.statistics
def component(score, constant):
    p = mr.stat.softmax(score + constant)
    return dict(lse=p.logsumexp, best=mr.stat.largest(score + constant))


def gaussian_mixture(x, log_weight, mean, log_width):
    """[N] log-likelihoods of x [N, D], and the likeliest of K components [K, D].

    The logarithm of a Gaussian is a product of [x, x^2] and [mean, -1/2] / width^2.
    """
    precision = (-2 * log_width).exp()
    b = torch.cat((mean * precision, -0.5 * precision), 1)
    constant = log_weight - (0.5 * mean**2 * precision + log_width).sum(1)
    constant = constant - 0.5 * x.shape[1] * math.log(math.tau)
    s = component(torch.cat((x, x.square()), 1), b, column={"constant": constant})
    return s.lse, s.best.index
    # --8<-- [end:mixture]


# --8<-- [start:quantize]
@mr.statistics
def nearest(score, x2, y2):
    return dict(nearest=mr.stat.smallest(x2 + y2 - 2 * score))


def quantize(x, code):
    """[N] squared distances to the nearest of K codes, and its index: the loss and the
    assignment of k-means (Lloyd, 1982) and of VQ-VAE (van den Oord et al., 2017).
    """
    s = nearest(**squares(x, code)).nearest
    return s.value, s.index
    # --8<-- [end:quantize]


# --8<-- [start:neighbours]
@mr.statistics
def closest(score, x2, y2):
    return dict(near=mr.stat.smallest(x2 + y2 - 2 * score, k=8))


def neighbours(x, known, value):
    """[N, E] means of the values [M, E] of the 8 nearest points, by inverse distance
    (Shepard, 1968).
    """
    near = closest(**squares(x, known)).near
    weight = 1 / (near.value.clamp(min=0) + 1e-6)
    return (weight[..., None] * value[near.index]).sum(1) / weight.sum(1)[:, None]
    # --8<-- [end:neighbours]


# --8<-- [start:chamfer]
def chamfer(x, y):
    """The Chamfer distance of two clouds (Fan et al., 2017)."""
    return sum(quantize(*of)[0].mean() for of in ((x, y), (y, x)))
    # --8<-- [end:chamfer]


# --8<-- [start:mmd]
@mr.statistics
def kernels(score, x2, y2):
    square = x2 + y2 - 2 * score
    wide, narrow = torch.exp(-0.5 * square), torch.exp(-2.0 * square)
    return dict(sum=mr.stat.total(wide + narrow))


def mmd(x, y):
    """The squared maximum mean discrepancy of two samples (Gretton et al., 2012)."""
    within = kernels(**squares(x, x)).sum.mean() / len(x)
    within = within + kernels(**squares(y, y)).sum.mean() / len(y)
    return within - 2 * kernels(**squares(x, y)).sum.mean() / len(y)
    # --8<-- [end:mmd]


# --8<-- [start:energy_distance]
@mr.statistics
def distances(score, x2, y2):
    square = x2 + y2 - 2 * score
    return dict(sum=mr.stat.total(torch.where(square > 0, square, 0.0).sqrt()))


@mr.statistics
def distances_to_others(score, x2, y2, row, column):
    square = torch.where(row != column, x2 + y2 - 2 * score, 0.0)
    return dict(sum=mr.stat.total(torch.where(square > 0, square, 0.0).sqrt()))


def energy_distance(x, y):
    """2 E|x - y| - E|x - x'| - E|y - y'| (Szekely and Rizzo, 2013)."""
    between = distances(**squares(x, y)).sum.mean() / len(y)
    within = (distances_to_others(**squares(z, z)).sum.mean() / len(z) for z in (x, y))
    return 2 * between - sum(within)
    # --8<-- [end:energy_distance]


# --8<-- [start:hsic]
@mr.statistics
def two_kernels(score, other, x2, y2, u2, v2):
    k = torch.exp(score - 0.5 * (x2 + y2))
    m = torch.exp(other - 0.5 * (u2 + v2))
    return dict(
        both=mr.stat.total(k * m), first=mr.stat.total(k), second=mr.stat.total(m)
    )


def hsic(x, y):
    """The Hilbert-Schmidt independence criterion of pairs (Gretton et al., 2005).

    x: [N, D]. y: [N, E]. With linear kernels its quotients are CKA (Kornblith, 2019).
    """
    x, y, n = x - x.mean(0), y - y.mean(0), len(x)
    of_x, of_y = x.square().sum(1), y.square().sum(1)
    row, column = {"x2": of_x, "u2": of_y}, {"y2": of_x, "v2": of_y}
    s = two_kernels(x, x, y, y, row=row, column=column)
    centred = (s.both - 2 / n * s.first * s.second).sum()
    return (centred + s.first.sum() * s.second.sum() / n**2) / n**2
    # --8<-- [end:hsic]


# --8<-- [start:sinkhorn]
@mr.statistics
def soft_minimum(score, x2, y2, potential):
    cost = 0.5 * (x2 + y2) - score
    return dict(lse=mr.stat.softmax(potential - cost).logsumexp)


def sinkhorn(x, y, blur=0.5, rounds=20):
    """The entropic transport cost of two uniform clouds (Cuturi, 2013).

    Also the potentials of x and y. The cost of a pair is |x - y|^2 / 2.
    """

    def update(a, b, of_b):  # in units of blur
        data = squares(a / blur**0.5, b / blur**0.5, potential=of_b)
        return math.log(len(b)) - soft_minimum(**data).lse

    of_x, of_y = x.new_zeros(len(x)), y.new_zeros(len(y))
    for _ in range(rounds):
        of_x = update(x, y, of_y)
        of_y = update(y, x, of_x)
    return blur * (of_x.mean() + of_y.mean()), blur * of_x, blur * of_y
    # --8<-- [end:sinkhorn]


# --8<-- [start:transport_map]
@mr.statistics
def plan(score, y2, potential, y):
    return dict(mean=mr.stat.softmax(score - y2 / 2 + potential).mean(y))


def transport_map(x, y, potential, blur=0.5):
    """[N, D] where the plan of `sinkhorn` moves x (Pooladian and Niles-Weed, 2021)."""
    column = {"y2": y.square().sum(1) / blur, "potential": potential / blur, "y": y}
    return plan(x, y, column=column, scale=1 / blur).mean
    # --8<-- [end:transport_map]
