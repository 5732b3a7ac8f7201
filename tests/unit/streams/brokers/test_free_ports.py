"""Tests of free ports of loopback."""

from __future__ import annotations

import random

from kvlane.streams.brokers.broker import free_ports


def test_no_port_is_given_twice_also_with_a_seeded_generator() -> None:
    ports = []
    for _ in range(20):
        random.seed(1)
        ports += free_ports(2)
    assert len(set(ports)) == len(ports)
