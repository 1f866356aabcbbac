"""Particles that move each other: physics, sampling, shapes and embeddings."""

import math

import torch

import monoidreduce as mr


# --8<-- [start:gravity]
@mr.statistics
def pull(score, x2, y2, row, column, mass, y):
    square = torch.where(row == column, math.inf, x2 + y2 - 2 * score)
    weight = mass * (square.clamp(min=0) + 0.01) ** -1.5
    return dict(sum=mr.stat.total(weight), at=mr.stat.total(weight * y))


def gravity(x, mass):
    """[N, D] accelerations of N bodies, softened by 0.1 (Aarseth, 1963)."""
    x = x - x.mean(0)
    square = x.square().sum(1)
    column = {"y2": square, "mass": mass, "y": x}
    s = pull(x, x, row={"x2": square}, column=column)
    return s.at - s.sum[:, None] * x
    # --8<-- [end:gravity]


# --8<-- [start:svgd]
@mr.statistics
def stein(score, x2, y2, push, y):
    weight = torch.exp(score - 0.5 * (x2 + y2))
    return dict(
        sum=mr.stat.total(weight),
        push=mr.stat.total(weight * push),
        at=mr.stat.total(weight * y),
    )


def svgd(x, score, width=1.0):
    """[N, D] directions of Stein's variational gradient descent (Liu and Wang, 2016).

    score: [N, D], gradients of the log-density at x.
    """
    z = x / width
    square = z.square().sum(1)
    column = {"y2": square, "push": score, "y": z}
    s = stein(z, z, row={"x2": square}, column=column)
    return (s.push + (s.sum[:, None] * z - s.at) / width) / len(x)
    # --8<-- [end:svgd]


# --8<-- [start:lddmm]
@mr.statistics
def velocity(score, x2, y2, p, pq):
    weight = torch.exp(score - 0.5 * (x2 + y2))
    return dict(p=mr.stat.total(weight * p), pq=mr.stat.total(weight * pq))


def shooting(q, p, steps=5):
    """[N, D] landmarks q with momenta p after a geodesic of diffeomorphisms (Miller et
    al., 2006): steps of Hamilton's equations of sum_ij k(q_i, q_j) <p_i, p_j> / 2.
    """
    for _ in range(steps):
        square = q.square().sum(1)
        column = {"y2": square, "p": p, "pq": (p[:, :, None] * q[:, None]).flatten(1)}
        s = velocity(q, q, row={"x2": square}, column=column)
        force = (p * s.p).sum(1, keepdim=True) * q
        force = force - (p[:, :, None] * s.pq.unflatten(1, (-1, q.shape[1]))).sum(1)
        q, p = q + s.p / steps, p + force / steps
    return q
    # --8<-- [end:lddmm]


# --8<-- [start:tsne]
@mr.statistics
def similarities(score, other, row, column, beta, x2, u2, v2):
    others = row != column
    near = torch.where(others, beta * (2 * score - x2), -math.inf)
    square = torch.where(others, u2 + v2 - 2 * other, 0.0)
    p = mr.stat.softmax(near)
    student = mr.stat.total(torch.where(others, 1 / (1 + square), 0.0))
    return dict(attraction=p.mean(torch.log1p(square)), student=student)


def tsne(x, y, beta):
    """t-SNE's loss (van der Maaten and Hinton, 2008), up to the entropy of P.

    x: [N, D], the data. y: [N, 2], the map. beta: [N], from the perplexity.
    """
    of_x, of_y = x.square().sum(1), y.square().sum(1)
    row, column = {"beta": beta, "u2": of_y}, {"x2": of_x, "v2": of_y}
    s = similarities(x, x, y, y, row=row, column=column)
    return s.attraction.mean() + s.student.sum().log()
    # --8<-- [end:tsne]
