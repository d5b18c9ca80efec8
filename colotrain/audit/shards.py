"""What ranks made shards of: `fully_shard` and FSDP take each rank's own values for its shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from colotrain.audit import model
from colotrain.audit.records import Sharding
from colotrain.audit.sites import Site, here
from colotrain.audit.sketch import packed, sketch


class Shards:
    """Sketches of whole parameters before they were sharded, and of the shards right after."""

    def __init__(self) -> None:
        self.calls = 0
        self.weights: dict[str, str] = {}
        self.site = Site("")
        self.is_known = True
        """Whether it can be told that shards were replaced after the call."""
        self._after: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def sharding(self, modules: Sequence[nn.Module]) -> None:
        """Sketch the whole parameters before a call shards them, and leave earlier shards alone."""
        self.calls, self.site = self.calls + 1, self.site if self.weights else here()
        units = [m for module in modules for m in module.modules() if model.is_fsdp(m)]
        shards = {id(parameter) for unit in units for parameter in unit.parameters()}
        for name, parameter in named(modules):
            if id(parameter) in shards:
                continue
            if not model.is_dtensor(parameter) and not parameter.is_meta and parameter.numel():
                self.weights[f"{self.calls}:{name}"] = packed(sketch(parameter))

    def sharded(self, modules: Iterable[nn.Module]) -> None:
        """Sketch the shards after a call of `fully_shard`."""
        for name, parameter in named(modules):
            key = f"{self.calls}:{name}"
            if key in self.weights and model.is_dtensor(parameter):
                self._after[key] = parameter, sketch(model.local(parameter))

    def event(self) -> Sharding | None:
        """Return what is known at the first step; None if nothing was sharded."""
        if not self.weights:
            return None
        kept = [
            key
            for key, (parameter, values) in self._after.items()
            if sketch(model.local(parameter)).equal(values)
        ]
        self._after.clear()
        return Sharding(
            weights=self.weights, kept=kept if self.is_known else None, site=self.site.plain()
        )


def named(modules: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [pair for module in modules for pair in module.named_parameters()]
