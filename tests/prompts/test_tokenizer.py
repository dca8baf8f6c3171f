"""The tokenizer of a folder is its tokenizer.json, whatever class its configuration names."""

import base64
import json
import logging
import re
import textwrap
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from megatron_scalerl.prompts.tokenizer import PROBE, load_tokenizer

CONFIGS = Path(__file__).parents[2] / "recipes/configs"
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
        assert "tokenizer.json is used, since LlamaTokenizer encodes" in caplog.text


@pytest.mark.parametrize(
    "model_type, message",
    [
        ("llama", "has no tokenizer that can be read"),
        *((kind, "there is no tokenizer in .* are missing; ") for kind in ("qwen2", "qwen3_moe", "gemma2", "t5")),
    ],
)
def test_a_folder_without_a_tokenizer_is_one_line(tmp_path, model_type, message):
    """transformers makes a tokenizer without tokens for some types of policies."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=rf"^policy.path: .*{message}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("release", ["Moonlight-16B-A3B-Instruct", "Kimi-K2-Instruct"])
def test_a_tokenizer_that_only_the_releases_code_reads_is_one_line(folder, release):
    """A tokenizer.json beside it is read; transformers alone does not read Kimi-K2's config.json."""
    (folder / "config.json").write_text((CONFIGS / release / "config.json").read_text())
    (folder / "tiktoken.model").write_text("IQ== 0")
    code = {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}
    settings = {"tokenizer_class": "TikTokenTokenizer", "auto_map": code}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer_json = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^policy\.path: .* has only tiktoken\.model.*tokenizer\.json.*$"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert load_tokenizer(folder).decode(load_tokenizer(folder)(TEXT)["input_ids"]) == TEXT


PATTERN = (
    r"""[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"""
)
"""Chinese apart from other letters, as Moonlight's."""


def release(folder, named):
    """A release with ranks of single bytes and a few merges, and special tokens at these places after them."""
    ranks = [bytes([byte]) for byte in range(256)] + [b"de", b"def", b" x", "数".encode()[:2], "数".encode(), b" 1"]
    folder.mkdir(parents=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(len(ranks) + place): {"content": token} for place, token in named.items()}
    code = {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}
    settings = dict(added_tokens_decoder=added, eos_token="[EOS]", chat_template="{{ messages }}", auto_map=code)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((CONFIGS / "Moonlight-16B-A3B-Instruct/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(ranks) + 16}))
    return len(ranks)


def test_the_programs_of_the_page_make_and_compare_a_releases_tokenizer(tmp_path, monkeypatch):
    """Special tokens that are not named lie between those that are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    first = release(tmp_path / "models/moonlight", {0: "[BOS]", 1: "[EOS]", 4: "<|im_end|>", 15: "[PAD]"})
    page = (CONFIGS.parents[1] / "docs/families.md").read_text()
    section = page.split("### Moonlight, step by step\n")[1].split("\n### ")[0]
    make, compare = (textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    assert make.count('PATTERN = r""') == 1
    names = {}
    exec(make.replace('r""', repr(PATTERN)), names)  # what the page has
    texts = [PROBE, TEXT, "x数学 def数x", "<|im_end|>[PAD] 1"]
    exec(compare, names | {"texts": texts})
    tokenizer = load_tokenizer("models/moonlight")
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "[PAD]"]) == [first + 4, first + 15]
    assert len(tokenizer) == first + 16 and tokenizer.eos_token == "[EOS]" and tokenizer.chat_template
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    assert not (tmp_path / "cache").exists()
    # without the tokens between them
    inner = names["TikTokenConverter"](
        names["path"], pattern=PATTERN, extra_special_tokens=[*names["named"].values()]
    )
    short = names["PreTrainedTokenizerFast"](tokenizer_object=inner.converted())
    with pytest.raises(AssertionError):
        exec(compare, names | {"texts": texts, "made": short})
