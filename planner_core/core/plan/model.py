"""The model that a plan is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What a plan says of its model.

    `source`: where the graph comes from, as `Graph.source`. `params`: its parameters. `loss`: as `Graph.loss`. `config`: the Hugging Face
    config that builds the model, or {"callable": "path.py:function"}. `layers`: the copies of each repeated block, by its name.
    `versions`: of the packages that name its operators. `own_shapes`: the model's own shapes of the parameters that the plan pads (a
    vocabulary), by name; checkpoints have these.
    """

    name: str
    params: int
    loss: str
    config: Mapping[str, Any]
    source: str = ""
    layers: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    own_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: `PlannedModel.from_json(m.to_json()) == m`."""
        return {
            "name": self.name,
            "source": self.source,
            "params": self.params,
            "loss": self.loss,
            "config": dict(self.config),
            "layers": dict(self.layers),
            "versions": dict(self.versions),
            **({"own_shapes": {n: list(shape) for n, shape in self.own_shapes.items()}} if self.own_shapes else {}),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PlannedModel:
        """Return the model of a plan file whose form was checked."""
        return PlannedModel(
            data["name"],
            data["params"],
            data["loss"],
            dict(data["config"]),
            data.get("source", ""),
            dict(data.get("layers", {})),
            dict(data.get("versions", {})),
            {name: tuple(shape) for name, shape in data.get("own_shapes", {}).items()},
        )
