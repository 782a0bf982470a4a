"""Built-in model families and sources, registered through the same hook as those of plugins."""

from __future__ import annotations

from mlxlab.hookspecs import hookimpl


@hookimpl
def mlxlab_register_models(register):
    from mlxlab.models.cohere import Cohere
    from mlxlab.models.decoder import Llama
    from mlxlab.models.falcon_h1 import FalconH1
    from mlxlab.models.gemma import Gemma, Gemma2, Gemma3
    from mlxlab.models.gemma3n import Gemma3n
    from mlxlab.models.gemma4 import Gemma4
    from mlxlab.models.glm4 import Glm4
    from mlxlab.models.gpt_oss import GptOss
    from mlxlab.models.granite import Granite, GraniteMoe
    from mlxlab.models.lfm2 import Lfm2
    from mlxlab.models.llama4 import Llama4Text
    from mlxlab.models.mamba2 import Mamba2
    from mlxlab.models.minicpm import MiniCPM, MiniCPM3
    from mlxlab.models.ministral import Ministral
    from mlxlab.models.mixtral import Mixtral
    from mlxlab.models.olmo import Olmo
    from mlxlab.models.phi import Phi, Phi3, PhiMoe
    from mlxlab.models.pretrained import Pretrained
    from mlxlab.models.qwen import Qwen, QwenMoe
    from mlxlab.models.qwen3_next import Qwen3Next
    from mlxlab.models.random_weights import RandomWeights
    from mlxlab.models.smollm3 import SmolLM3
    from mlxlab.models.tiny import TinyGemma4, TinyLlama

    register("cohere", Cohere)
    register("falcon_h1", FalconH1)
    register("gemma", Gemma)
    register("gemma2", Gemma2)
    register("gemma3", Gemma3)
    register("gemma3n", Gemma3n)
    register("gemma4", Gemma4)
    register("glm4", Glm4)
    register("gpt_oss", GptOss)
    register("granite", Granite)
    register("granite_moe", GraniteMoe)
    register("lfm2", Lfm2)
    register("llama", Llama)
    register("llama4_text", Llama4Text)
    register("mamba2", Mamba2)
    register("minicpm", MiniCPM)
    register("minicpm3", MiniCPM3)
    register("ministral", Ministral)
    register("mixtral", Mixtral)
    register("olmo", Olmo)
    register("phi", Phi)
    register("phi3", Phi3)
    register("phi_moe", PhiMoe)
    register("qwen", Qwen)
    register("qwen_moe", QwenMoe)
    register("qwen3_next", Qwen3Next)
    register("smollm3", SmolLM3)
    register("pretrained", Pretrained)
    register("random", RandomWeights)
    register("tiny_llama", TinyLlama)
    register("tiny_gemma4", TinyGemma4)
