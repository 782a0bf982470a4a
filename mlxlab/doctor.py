"""`python -m mlxlab doctor`: what this machine uses, and whether every strategy and head computes the same on it."""

from __future__ import annotations

import itertools
import platform
import sys
from importlib import metadata
from typing import Sequence

from mlxlab import __version__

# Relative norm of the gradient difference that float32 arithmetic explains; CUDA multiplies float32 in tf32 by default.
TOLERANCES = {"cpu": 1e-5, "metal": 1e-4, "cuda": 5e-3}


def main(arguments: Sequence[str]) -> int:
    """Print versions and device, run the checks, return 1 if one fails."""
    if arguments:
        print(f"doctor takes no arguments, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    from mlxlab import backend

    packages = ("mlx", "mlx-lm", "hydra-core", "transformers")
    print(f"python {platform.python_version()} on {platform.platform()}")
    print(f"mlxlab {__version__}, " + ", ".join(f"{name} {metadata.version(name)}" for name in packages))
    print(backend.describe())
    print(f"memory: {backend.memory_bytes() / 1e9:.1f} GB")
    return 0 if check() else 1


def check() -> bool:
    """Gradients of tiny models, 8-bit weights, under every strategy and head against the plain ones."""
    from mlxlab import backend
    from mlxlab.heads import flash_check
    from mlxlab.heads.chunked import Chunked
    from mlxlab.heads.flash import Flash
    from mlxlab.heads.fused import Fused
    from mlxlab.heads.naive import Naive
    from mlxlab.lora import LoraConfig, apply_lora
    from mlxlab.memory.backward.checkpoint import Checkpoint
    from mlxlab.memory.backward.plain import Plain
    from mlxlab.memory.backward.segmented import Segmented
    from mlxlab.memory.layouts.packed import Packed
    from mlxlab.memory.layouts.prefix_shared import PrefixShared
    from mlxlab.memory.layouts.separate import Separate
    from mlxlab.methods.orpo import Orpo
    from mlxlab.models.decoder import Llama
    from mlxlab.models.gemma4 import Gemma4
    from mlxlab.models.load import load
    from mlxlab.models.tiny import VOCABULARY, TinyGemma4, TinyLlama
    from mlxlab.testing import parity, random_examples, randomize, reference_step

    tolerance, passed, method = TOLERANCES[backend.device()], True, Orpo()
    batch = random_examples(method, VOCABULARY)
    for source, family in ((TinyLlama(bits=8), Llama), (TinyGemma4(bits=8), Gemma4)):
        loaded = load(source.folder(), family, dtype="float32")
        # with a scale of 20 and random leaves the last bit of a leaf moves the gradient by 1e-4; with 2, by 2e-6
        options, paths = LoraConfig(rank=4, scale=2.0), [block.path for block in loaded.adapter.blocks()]
        lora = apply_lora(loaded.model, paths, options, seed=0)
        randomize(lora)
        reference = reference_step(loaded.adapter, lora, method, batch)
        for layout, backward in itertools.product(
            (Separate(), PrefixShared()), (Plain(), Checkpoint(), Checkpoint("half"), Segmented())
        ):
            heads = (Naive(), Chunked(7), Fused(7), Flash(9, 50))
            results = [parity(loaded.adapter, lora, method, h, backward, layout, batch, reference) for h in heads]
            worst = max(gradient for _, gradient in results)
            verdict = "ok" if worst < tolerance else "FAILED"
            passed &= worst < tolerance
            print(f"{verdict:<7} {family.__name__:<7} {backward!r} {layout!r}: gradient difference {worst:.1e}")
        found = [
            parity(loaded.adapter, lora, method, Fused(7), Segmented(), layout, batch, reference, "blockwise")[1]
            for layout in (Separate(), PrefixShared(), Packed())
        ]
        verdict = "ok" if max(found) < tolerance else "FAILED"
        passed &= max(found) < tolerance
        print(f"{verdict:<7} {family.__name__:<7} attention=blockwise: gradient difference {max(found):.1e}")
    for line in flash_check.status():
        print(line)
    print(f"tolerance {tolerance:.0e} on {backend.device()}: {'all checks passed' if passed else 'SOME CHECKS FAILED'}")
    return passed
