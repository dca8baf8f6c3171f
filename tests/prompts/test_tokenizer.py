"""The tokenizer of a folder is its tokenizer.json, whatever class its configuration names."""

import json
import logging

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from megatron_scalerl.prompts.tokenizer import PROBE, load_tokenizer

TEXT = "def f(x):\n    return x + 1  # 12 * 13"


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer, as that of Llama 3 and its distilled models."""
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    byte_level.train_from_iterator([TEXT, PROBE] * 20, trainer)
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "LlamaTokenizer", "Qwen2TokenizerFast", "Unknown"])
def test_no_space_is_lost_whatever_class_is_named(folder, name, caplog):
    settings = {
        "tokenizer_class": name,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(folder)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<eos>", "{{ messages }}")
    lossy = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if name.startswith("Llama"):  # what this guards against; where it passes, transformers is mended
        assert lossy.decode(lossy(TEXT, add_special_tokens=False)["input_ids"]) != TEXT
        assert "tokenizer.json is used, from which LlamaTokenizer differs" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("llama", "has no tokenizer that can be read"),
        *((kind, "there is no tokenizer in .*: it has none of ") for kind in ("qwen2", "qwen3_moe", "gemma2", "t5")),
    ],
)
def test_a_folder_without_a_tokenizer_is_one_line(tmp_path, model_type, message):
    """transformers makes a tokenizer without tokens for some types of policies."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=rf"^policy.path: .*{message}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_a_tokenizer_that_only_the_releases_code_reads_is_one_line(folder, model_type):
    """As Moonlight and Kimi-K2 have it; a tokenizer.json beside it is read."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tiktoken.model").write_text("IQ== 0")
    code = {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}
    settings = {"tokenizer_class": "TikTokenTokenizer", "auto_map": code}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer_json = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^policy\.path: .* has tiktoken\.model.*tokenizer\.json.*$"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert load_tokenizer(folder).decode(load_tokenizer(folder)(TEXT)["input_ids"]) == TEXT
