"""The constants from which the time of a GPU's kernels and collectives follows. They are fitted to published measurements.

A GPU's file (`assets/hardware`) has them, each group with its source and residual. The formulas are in `cost.compute` and
`cost.communication`. A GPU without these constants is a plain roofline: every product runs at `flops_efficiency`, and a collective
takes latency plus bytes over bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

NOTES = ("source", "residual", "notes")
"""Entries of a group of constants that are for people."""


@dataclass(frozen=True, slots=True)
class Products:
    """A matrix product's time by its shape (`cost.compute.products`).

    `units`: the number of the GPU's multiprocessors. `waves`: a product runs in whole waves of tiles over them; else its time is
    smooth in its shape. `ramp_k`: the start and end of a tile take as long as this much of k. `small_tile`: the factor by which a
    multiply-add is slower in a tile smaller than 128 x 256. `fixed_s`: seconds that every product takes.
    """

    units: int = 1
    waves: bool = False
    ramp_k: float = 0.0
    small_tile: float = 1.0
    fixed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """The shares of `peak_flops` that one attention kernel reaches with a head dim of 128 and long sequences."""

    kernel: str
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Attentions:
    """Attention's time by its shape (`cost.compute.attention`).

    A head dim d below 128 runs at (d / 128) ** `head_power` of the rate. With S keys the time is multiplied by
    1 + `ramp_keys` / S. `torch`: the kernel that `scaled_dot_product_attention` asks first for 16 bits without a mask.
    """

    rates: tuple[AttentionRate, ...] = ()
    head_power: float = 0.0
    ramp_keys: float = 0.0
    torch: str = "flash2"


@dataclass(frozen=True, slots=True)
class Collectives:
    """A collective's time by its kind, size and ranks (`cost.communication.collectives`).

    `base_s`: seconds that every collective takes. `hop_s`: a step inside a node. `ring_hop_s`: a ring's step to another node.
    `tree_hop_s`: a tree's step to another node. `efficiency` and `outer_efficiency`: the shares of a link's rate, inside and between
    nodes, that large messages reach; with few ranks, `few` / ranks of the share inside is lost. `curve`: the weight of
    sqrt(latency x transfer). `summing`: the latency of a collective that adds, divided by that of one that does not. `in_switch`: the
    factor on an all_reduce's transfer if the switch of a node of eight GPUs adds the terms.
    """

    base_s: float
    hop_s: float
    ring_hop_s: float
    tree_hop_s: float
    efficiency: float = 1.0
    outer_efficiency: float = 1.0
    few: float = 0.0
    curve: float = 0.0
    summing: float = 1.0
    in_switch: float = 1.0


@dataclass(frozen=True, slots=True)
class HostLink:
    """What a GPU sends to the host's memory: `bytes_per_s` one way, of which large copies reach the share `efficiency`."""

    bytes_per_s: float
    efficiency: float = 1.0

    @property
    def reached_bytes_per_s(self) -> float:
        """Bytes per second of large copies."""
        return self.efficiency * self.bytes_per_s


_GROUPS: Mapping[str, Callable[..., Any]] = {
    "products": Products,
    "attention": Attentions,
    "collectives": Collectives,
    "host": HostLink,
}


def kernels_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of constants that a GPU's file has, by the field of `Gpu`. The schema has checked their form."""
    groups = {name: _read_constants(data[name]) for name in _GROUPS if data.get(name) is not None}
    if "attention" in groups:
        rates = groups["attention"].get("rates", {}).items()
        groups["attention"]["rates"] = tuple(AttentionRate(name, **_read_constants(rate)) for name, rate in rates)
    return {name: _GROUPS[name](**constants) for name, constants in groups.items()}


def kernels_json(
    products: Products, attentions: Attentions, collectives: Collectives | None, host: HostLink | None
) -> dict[str, Any]:
    """Return the groups of constants in the form of a GPU's file; those that are not known are left out."""
    rates = {r.kernel: {"forward": r.forward, "backward": r.backward} for r in attentions.rates}
    measured = {"collectives": collectives, "host": host}
    return {
        "products": asdict(products),
        "attention": {**asdict(attentions), "rates": rates},
        **{name: asdict(one) for name, one in measured.items() if one is not None},
    }


def _read_constants(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in NOTES}
