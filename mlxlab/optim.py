"""AdamW with bias correction, learning-rate schedules, LoRA+ and clipping, on flat dictionaries of arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping

import mlx.core as mx
import mlx.optimizers

from mlxlab.errors import CheckpointError, ConfigError, nearest
from mlxlab.interfaces import Params

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter, 2019), with bias correction.

    Args:
        learning_rate: at the peak, > 0.
        schedule: "cosine", "linear" or "constant", after the warm-up.
        warmup: updates (not micro-batches) over which the rate rises linearly, >= 0; for every schedule.
        final_ratio: rate that the schedule falls to, as a share of the peak, 0 to 1; it would be reached one update
            after the last. "constant" does not fall, so that another value than the default is refused with it.
        betas: decay of the averages of gradients and of their squares.
        eps: added to the root of the second average.
        weight_decay: decoupled, per update, times the learning rate.
        lora_plus_ratio: learning rate of B over that of A, >= 1 (LoRA+, Hayou et al., 2024).
    """

    learning_rate: float
    schedule: str = "cosine"
    warmup: int = 0
    final_ratio: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    lora_plus_ratio: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be > 0 and finite, got {self.learning_rate}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} does not exist; {nearest(self.schedule, SCHEDULES)}")
        if self.warmup < 0:
            raise ValueError(f"warmup must be >= 0, got {self.warmup}")
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"final_ratio must be between 0 and 1, got {self.final_ratio}")
        if self.schedule == "constant" and self.final_ratio != type(self).final_ratio:
            raise ValueError(
                f"final_ratio={self.final_ratio} has no effect with schedule=constant; leave it out, or choose "
                "linear or cosine"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers >= 0 and < 1, got {list(self.betas)}")
        if not self.eps > 0:
            raise ValueError(f"eps must be > 0, got {self.eps}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be >= 0, got {self.weight_decay}")
        if not 1 <= self.lora_plus_ratio < math.inf:
            raise ValueError(f"lora_plus_ratio must be >= 1 and finite, got {self.lora_plus_ratio}")


def learning_rate_at(step: int, config: OptimConfig, total: int) -> float:
    """Learning rate of update `step` (the first is 1) of `total`.

    With s = step - 1 and W warm-up updates: peak (s + 1) / W while s < W; then the schedule over
    q = (s - W) / (total - W), from the peak at q = 0 towards final_ratio * peak at q = 1.
    """
    s, peak, warmup = step - 1, config.learning_rate, config.warmup
    if s < warmup:
        return peak * (s + 1) / warmup
    if config.schedule == "constant":
        return peak
    q = min(max((s - warmup) / max(total - warmup, 1), 0.0), 1.0)
    low = config.final_ratio * peak
    share = 0.5 * (1 + math.cos(math.pi * q)) if config.schedule == "cosine" else 1 - q
    return low + (peak - low) * share


def clip_by_global_norm(grads: Params, max_norm: float) -> tuple[Params, float]:
    """Scale gradients so that their common L2 norm is at most `max_norm` (0: never); also the norm before that."""
    norm = math.sqrt(sum(mx.square(g.astype(mx.float32)).sum() for g in grads.values()).item())
    if max_norm and norm > max_norm:
        grads = {name: g * (max_norm / norm) for name, g in grads.items()}
    return grads, norm


class Optimizer:
    """Two of MLX's AdamW, one for the A and one for the B leaves, whose rates may differ (LoRA+).

    Args:
        config: options.
        total: number of updates of the run, for the schedule.

    Raises:
        ConfigError: the warm-up is as long as the run.
    """

    def __init__(self, config: OptimConfig, total: int):
        if total and config.warmup >= total:
            raise ConfigError(
                f"optim.warmup={config.warmup} takes all {total} updates of this run, so the peak learning rate would "
                f"never be used; give less than {total}."
            )
        self.config, self.total = config, total
        options = {"betas": list(config.betas), "eps": config.eps, "weight_decay": config.weight_decay}
        self._parts = {
            leaf: mlx.optimizers.AdamW(config.learning_rate, bias_correction=True, **options) for leaf in ("a", "b")
        }

    def update(self, params: Params, grads: Params, step: int) -> Params:
        """New parameters after update `step` (the first is 1), evaluated together with the optimizer's state."""
        assert params.keys() == grads.keys(), "gradients of other leaves"
        rate = learning_rate_at(step, self.config, self.total)
        new: Params = {}
        for leaf, part in self._parts.items():
            part.learning_rate = rate * (self.config.lora_plus_ratio if leaf == "b" else 1.0)
            mine = {name: g.astype(mx.float32) for name, g in grads.items() if name.endswith(f"lora_{leaf}")}
            new |= part.apply_gradients(mine, {name: params[name] for name in mine})
        assert new.keys() == params.keys(), "parameters that are neither A nor B"
        mx.eval(new, self.state())
        return {name: new[name] for name in params}

    def state(self) -> dict[str, mx.array]:
        """Moments and step counts, flat."""
        return {f"{leaf}/{n}": v for leaf, part in self._parts.items() for n, v in _flat(part.state).items()}

    def load_state(self, state: Mapping[str, mx.array]) -> None:
        """Continue from what `state` returned.

        Raises:
            CheckpointError: not the state of such an optimizer.
        """
        strange = [name for name in state if name.partition("/")[0] not in self._parts]
        missing = [f"{leaf}/step" for leaf in self._parts if f"{leaf}/step" not in state]
        if strange or missing:
            what = f"{strange[0]} is unknown" if strange else f"{missing[0]} is missing"
            raise CheckpointError(
                f"this is not the state of an optimizer: {what}; use the optimizer.safetensors of a run."
            )
        for leaf, part in self._parts.items():
            mine = [(n.removeprefix(f"{leaf}/"), v) for n, v in state.items() if n.startswith(f"{leaf}/")]
            part.state = _nested(mine)


# Names of leaves have dots; MLX's tree functions would split them, so the moments are one level deep here.
def _flat(state: Mapping) -> dict[str, mx.array]:
    flat = {}
    for name, value in state.items():
        if isinstance(value, mx.array):
            flat[name] = value
        else:
            flat |= {f"{name}/{moment}": array for moment, array in value.items()}
    return flat


def _nested(items: list[tuple[str, mx.array]]) -> dict:
    state: dict = {}
    for name, value in items:
        head, _, moment = name.rpartition("/")
        if head:
            state.setdefault(head, {})[moment] = value
        else:
            state[moment] = value
    return state
