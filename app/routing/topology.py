"""Topology: where workers stand, told by their taints `topology/<domain>=<value>`.

What prefill has computed is fetched by decode, and that is cheap within a domain (a rack, a zone)
only. So the domain of the worker that prefills becomes a constraint on the one that decodes,
required or preferred. Never here: which worker that is.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from streams.records import RoutingConstraints

PREFIX = "topology/"


def taint_of(domain: str, value: str) -> str:
    """The taint of a worker that stands there."""
    return f"{PREFIX}{domain}={value}"


def place_in(domain: str, taints: Iterable[str]) -> str | None:
    """The taint that says where a worker with these taints stands; None if it does not say."""
    prefix = taint_of(domain, "")
    return min((t for t in taints if t.startswith(prefix) and t != prefix), default=None)


def near(
    constraints: RoutingConstraints | None,
    domain: str,
    taints: Iterable[str],
    weight: float | None = None,
) -> RoutingConstraints | None:
    """The constraints of a request, with those of being near a worker with these taints.

    `weight`: of the preference; None requires it. The worker's wins over an equal preferred taint
    of the request. Raises LookupError when it is required and the worker does not say where it is:
    to be called before anything is computed there.
    """
    taint = place_in(domain, taints)
    if taint is None:
        if weight is None:
            raise LookupError(f"the worker has no taint {taint_of(domain, '')}…")
        return constraints
    known = constraints or RoutingConstraints()
    if weight is None:
        required = dict.fromkeys((*known.required_taints, taint))
        return replace(known, required_taints=tuple(required))
    return replace(known, preferred_taints=known.preferred_taints | {taint: weight})
