"""Meshes, and the time of collectives between their chips, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from monoidreduce import plan
from monoidreduce.plan import HARDWARE, NETWORKS, Axis, Link, Mesh

V5P, H100 = HARDWARE["v5p"], HARDWARE["h100"]
# 1e9 bytes/s in a node of 8, a tenth of it between nodes; no latencies.
ROUND = replace(H100, within=Link(1e9, 0, "round"), between=Link(1e8, 0, "round"))


def mesh(hardware: Any = ROUND, **sizes: int) -> Mesh:
    return Mesh(hardware, tuple(Axis(name, size) for name, size in sizes.items()))


def test_the_last_axis_lies_in_a_node() -> None:
    found = mesh(dp=4, pipeline=2, tp=8)
    assert (found.wire(1, "tp").ranks, found.wire(1, "tp").nodes) == (8, 1)
    assert (found.wire(1, "dp").ranks, found.wire(1, "dp").nodes) == (4, 4)
    # Four chips of tp leave room for two of the next axis.
    assert mesh(dp=8, tp=4).wire(1, "dp").nodes == 4
    assert mesh(fsdp=64).wire(1, "fsdp").nodes == 8
    assert mesh(fsdp=6, tp=3).wire(1, "fsdp").nodes == 3  # two of three chips fit into a node of 8


def test_collectives_in_a_node_and_between_nodes() -> None:
    whole = 8e9
    in_node = mesh(fsdp=8).wire(1, "fsdp")
    assert in_node.gather_seconds(whole) == pytest.approx(7)  # 7/8 of it
    assert in_node.reduce_seconds(whole) == pytest.approx(14)
    # Over two nodes: 4e9 bytes through the networks of 8 chips, 5 s; 15/16 through the links, 7.5 s.
    assert mesh(fsdp=16).wire(1, "fsdp").gather_seconds(whole) == pytest.approx(7.5)
    # One chip a node: 1/2 of it through its own network.
    assert mesh(fsdp=2, tp=8).wire(1, "fsdp").gather_seconds(whole) == pytest.approx(40)
    assert mesh(pipeline=2, tp=8).wire(1, "pipeline").send_seconds(1e9) == pytest.approx(10)
    assert mesh(pipeline=2, tp=4).wire(1, "pipeline").send_seconds(1e9) == pytest.approx(1)
    assert mesh(fsdp=1).wire(1, "fsdp").gather_seconds(whole) == 0


def test_an_all_to_all_crosses_the_network_once_a_node() -> None:
    wire = mesh(expert=16).wire(1, "expert")
    # Eight of 16 parts go to the other node.
    assert wire.exchange_seconds(16e8) == pytest.approx(8)
    # A token for several chips of the other node is sent there once; that node's links forward it.
    assert wire.exchange_seconds(16e8, across=2e8) == pytest.approx(2)
    assert wire.exchange_seconds(16e8, across=1e8) == pytest.approx(16e8 * 7 / 8 / 1e9)


def test_fractions_of_published_rates() -> None:
    """They are of links that nobody measured, and of networks."""
    unmeasured = replace(ROUND, within=None, link=1e9, between=NETWORKS["roce-400"])
    wire = mesh(unmeasured, dp=2, tp=8).wire(0.5, "tp")
    assert wire.within.rate == 5e8
    between = mesh(unmeasured, dp=2, tp=8).wire(0.5, "dp").between
    assert between is not None and between.rate == 2.5e10


def test_networks_by_name() -> None:
    named = Mesh(H100, (Axis("dp", 4), Axis("tp", 8)), "roce-200")
    assert named.between is NETWORKS["roce-200"] and str(named).endswith("; roce-200 between nodes")
    assert Mesh(H100, (Axis("dp", 4), Axis("tp", 8))).between is H100.between
    # Of a torus, an axis may leave it.
    pods = Mesh(HARDWARE["v4"], (Axis("dp", 2, "dcn"), Axis("fsdp", 256, 2), Axis("tp", 12)))
    assert pods.joined == 3072 and pods.chips == 6144
    assert pods.wire(1, "dp").nodes == 2 and pods.wire(1, "fsdp").nodes == 1
    assert pods.wire(1, "fsdp").within.rate == 2 * HARDWARE["v4"].link
    assert "dp 2 over dcn, fsdp 256 over 2 axes, tp 12" in str(pods)


def test_meshes_have_every_factorisation_once() -> None:
    found = [tuple(a.size for a in m.axes) for m in plan.meshes(H100, 12, ("dp", "fsdp", "tp"))]
    # 12 = 2^2 * 3 into three: 6 * 3.
    assert len(found) == len(set(found)) == 18
    assert all(a * b * c == 12 for a, b, c in found)
    alone = replace(H100, between=None)
    assert not [*plan.meshes(alone, 12, ("dp", "tp"))]  # NVLink joins no 12 chips


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: Axis("ep", 2), "strategy: expected one of dp, fsdp, tp, vocab, context, pipeline, expert"),
        (lambda: Axis("tp", 0), "size: expected an int >= 1, got 0"),
        (lambda: Axis("tp", 2, 0), "links: expected a finite number > 0, got 0"),
        (lambda: Axis("tp", 2, "wifi"), "links: expected one of infiniband-hdr"),
        (lambda: Mesh(V5P, (Axis("tp", 2), Axis("tp", 2))), "axes: expected each strategy once"),
        (lambda: Mesh(H100, (), "wifi"), "network: expected one of infiniband-hdr"),
        (
            lambda: Mesh(V5P, (Axis("tp", 2, 2), Axis("dp", 2, 2))),
            "links: expected at most the 3 of v5p in all, got 4",
        ),
        (
            lambda: Mesh(replace(H100, between=None), (Axis("tp", 16),)),
            "size: expected at most the 8 chips that the links of h100 join, got 16",
        ),
        (
            lambda: Mesh(V5P, (Axis("dp", 8961),)),
            "size: expected at most the 8960 chips that the links of v5p join, got 8961",
        ),
    ],
)
def test_meshes_that_are_refused(call: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call()
