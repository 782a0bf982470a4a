"""Other trainers for MLX, measured as their users run them: their own training function, unchanged, on the same rows.

The loop is theirs: compiled step, optimizer, evaluation of the state, report. With a report after every step, each
report is one timed step. They get the same checkpoint in the same dtype, LoRA on the same layers, and rows that are
tokens already. On a CPU the dtype is a favour: with float16 scales, as SmolLM2 is stored, MLX's products with packed
weights run at 0.04 GFLOP/s instead of 2 (MLX 0.32.4, [128, 576] x [576, 1536], 2 cores of an Intel Xeon).
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np

from mlxlab import backend
from mlxlab.errors import ConfigError
from mlxlab.interfaces import Example, TokenSequence
from mlxlab.models.load import DTYPES, resolve_dtype


@dataclass
class Reports:
    """A trainer's callback: seconds and loss of each step; peaks count from the end of the first one on."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def on_train_loss_report(self, info: dict[str, Any]) -> None:
        self.seconds.append(1 / info["iterations_per_second"])
        self.losses.append(info["train_loss"])
        if len(self.losses) == 1:
            mx.synchronize()
            mx.clear_cache()
            mx.reset_peak_memory()

    def on_val_loss_report(self, info: dict[str, Any]) -> None:
        """There are no validation rows."""


def check(peer: str, method: str) -> None:
    """ConfigError if a peer is not installed or has no trainer for the method."""
    package, _ = PEERS[peer]
    if find_spec(package) is None:
        name = package.replace("_", "-")
        raise ConfigError(f"bench: peers={peer} needs the package {name}, which is not installed; pip install {name}")
    if package == "mlx_lm_lora" and method not in _MLX_LM_LORA:
        raise ConfigError(
            f"bench: peers={peer} has no counterpart of method={method}; choose {' or '.join(_MLX_LM_LORA)}"
        )


def run(
    peer: str,
    method: str,
    checkpoint: Path,
    config: Any,
    targets: Sequence[str],
    examples: Sequence[Example],
    steps: int,
) -> Reports:
    """Train `steps` steps with another program.

    Args:
        method: name of the training method; mlx-lm's own trainer knows next-token prediction only, and gets the
            branches of preference rows as ordinary rows.
        checkpoint: folder that mlx-lm loads.
        config: the RunConfig of the cell; its LoRA and learning rate hold for the peer, too.
        targets: linear layers that get LoRA, last parts of their paths.
        examples: the rows of one step.
    """
    package, checkpointing = PEERS[peer]
    reports = Reports()
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "batch_size": len(examples),
            "iters": steps,
            "steps_per_report": 1,
            "steps_per_eval": steps + 1,
            "steps_per_save": steps + 1,
            "max_seq_length": max(len(s) for example in examples for s in example.branches.values()),
            "grad_checkpoint": checkpointing,
            "adapter_file": str(Path(folder) / "adapters.safetensors"),
        }
        optimizer = optimizers.AdamW(config.optim.learning_rate)
        train = _mlx_lm if package == "mlx_lm" else _MLX_LM_LORA[method]
        train(
            lambda lora=True: _model(checkpoint, config, targets if lora else ()),
            config,
            optimizer,
            examples,
            arguments,
            reports,
        )
    return reports


def _model(checkpoint: Path, config: Any, targets: Sequence[str]) -> nn.Module:
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(checkpoint)
    model.set_dtype(DTYPES[resolve_dtype(config.model.dtype)])
    model.freeze()
    if targets:
        keys = {
            path
            for path, module in model.layers[-1].named_modules()
            if isinstance(module, (nn.Linear, nn.QuantizedLinear))
            and any(f".{path}".endswith(f".{target}") for target in targets)
        }
        parameters = {"rank": config.lora.rank, "scale": config.lora.scale, "dropout": 0.0, "keys": sorted(keys)}
        linear_to_lora_layers(model, config.lora.num_layers, parameters)
    mx.eval(model.parameters())
    return model


def _mlx_lm(model, config, optimizer, examples, arguments, reports) -> None:
    from mlx_lm.tuner import trainer

    sequences = [sequence for example in examples for sequence in example.branches.values()]
    whole = any("prompt" in parts for parts in config.method.spans().values())
    batch = mx.array(np.stack([sequence.ids for sequence in sequences]))
    bounds = mx.array([[1 if whole else _prompt(sequence), len(sequence)] for sequence in sequences])

    def batches(**_) -> Iterator[tuple[mx.array, mx.array]]:
        while True:
            yield batch, bounds

    trainer.train(
        model(),
        optimizer,
        sequences,
        args=trainer.TrainingArgs(**arguments),
        iterate_batches=batches,
        training_callback=reports,
    )


def _orpo(model, config, optimizer, examples, arguments, reports) -> None:
    from mlx_lm_lora.trainer.orpo_trainer import ORPOTrainingArgs, train_orpo

    _give_device_figures()
    rows, beta = _preference_rows(examples), config.method.weight
    arguments = ORPOTrainingArgs(**arguments, beta=beta)
    train_orpo(model(), optimizer, rows, args=arguments, training_callback=reports)


def _dpo(model, config, optimizer, examples, arguments, reports) -> None:
    from mlx_lm_lora.trainer.dpo_trainer import DPOTrainingArgs, train_dpo

    _give_device_figures()
    train_dpo(
        model(),
        model(lora=False),
        optimizer,
        _preference_rows(examples),
        args=DPOTrainingArgs(**arguments, beta=config.method.beta),
        training_callback=reports,
    )


def _preference_rows(examples: Sequence[Example]) -> list[dict[str, Any]]:
    return [
        {
            "chosen": example.branches["chosen"].ids.tolist(),
            "rejected": example.branches["rejected"].ids.tolist(),
            "chosen_prompt_length": _prompt(example.branches["chosen"]),
            "rejected_prompt_length": _prompt(example.branches["rejected"]),
        }
        for example in examples
    ]


def _prompt(sequence: TokenSequence) -> int:
    """Tokens before the response."""
    return int(sequence.response.argmax())


def _give_device_figures() -> None:
    """mlx-lm-lora reads a figure that only Metal reports, and sets a limit that only Metal has."""
    figures = mx.device_info()
    if "max_recommended_working_set_size" in figures:
        return
    figures = {**figures, "max_recommended_working_set_size": math.floor(0.75 * backend.memory_bytes())}
    mx.device_info = lambda *_: figures
    mx.set_wired_limit = lambda limit: 0


# peer -> (package, whether with its gradient checkpointing)
PEERS: dict[str, tuple[str, bool]] = {
    "mlx_lm": ("mlx_lm", False),
    "mlx_lm_checkpoint": ("mlx_lm", True),
    "mlx_lm_lora": ("mlx_lm_lora", False),
    "mlx_lm_lora_checkpoint": ("mlx_lm_lora", True),
}
_MLX_LM_LORA: dict[str, Callable[..., None]] = {"orpo": _orpo, "dpo": _dpo}
