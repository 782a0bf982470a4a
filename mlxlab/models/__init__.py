"""Built-in model families and sources, registered through the same hook as those of plugins."""

from __future__ import annotations

from mlxlab.hookspecs import hookimpl


@hookimpl
def mlxlab_register_models(register):
    from mlxlab.models.decoder import Llama, Qwen
    from mlxlab.models.gemma4 import Gemma4
    from mlxlab.models.pretrained import Pretrained
    from mlxlab.models.random_weights import RandomWeights
    from mlxlab.models.tiny import TinyGemma4, TinyLlama

    register("llama", Llama)
    register("qwen", Qwen)
    register("gemma4", Gemma4)
    register("pretrained", Pretrained)
    register("random", RandomWeights)
    register("tiny_llama", TinyLlama)
    register("tiny_gemma4", TinyGemma4)
