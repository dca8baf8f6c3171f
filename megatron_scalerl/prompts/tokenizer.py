"""The tokenizer of a policy's folder, checked against tokenizer.json and the model."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from megatron_scalerl.models import read_hf_config
from megatron_scalerl.prompts.rendering import check_vocabulary
from megatron_scalerl.recipe import Recipe

logger = logging.getLogger(__name__)
PROBE = "def f(x):\n    return x + 12 * 345  # Größe, 数学, 👍\n\n\tThe answer is \\boxed{7}."
"""Text with which two encodings are compared: spaces, indentation, digits, other scripts."""


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a Hugging Face folder so that texts are encoded as in tokenizer.json.

    The class that tokenizer_config.json names may encode differently from tokenizer.json: as LlamaTokenizerFast,
    transformers 5 drops every space of a byte-level tokenizer.json. If the class encodes PROBE differently,
    transformers' plain class for tokenizer.json is used. Raises ValueError for a folder without a tokenizer, and for
    a tokenizer that only Python code in the folder can read.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file() and Path(path, "tiktoken.model").is_file():
        raise ValueError(
            f"policy.path: {path} has only tiktoken.model, which only code in the folder can read, and such code is "
            "never run; convert the file to tokenizer.json (docs/families.md)"
        )
    config = None
    with suppress(ValueError):  # without a supported config the tokenizer is still read
        # `config` is passed on, because transformers alone cannot read the configuration of Kimi-K2
        config = read_hf_config(path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, config=config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"policy.path: {path} has no tokenizer that can be read ({cause})") from None
    files = list(tokenizer.vocab_files_names.values())
    # from a folder without the tokenizer's files, transformers makes an empty tokenizer
    if files and not any(Path(path, name).is_file() for name in files):
        raise ValueError(
            f"policy.path: there is no tokenizer in {path}: {', '.join(files)} are missing; copy the files from "
            "the policy from which this folder was made"
        )
    if not file.is_file():
        return tokenizer
    from tokenizers import Tokenizer

    expected = Tokenizer.from_file(str(file)).encode(PROBE, add_special_tokens=False).ids
    if _ids(tokenizer) == expected:
        return tokenizer
    plain_tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)
    if _ids(plain_tokenizer) != expected:
        raise ValueError(
            f"policy.path: {path}: {type(tokenizer).__name__} (tokenizer_class in tokenizer_config.json) encodes "
            "text differently from tokenizer.json, and so does transformers' plain class"
        )
    logger.warning("%s: tokenizer.json is used, since %s encodes text differently", path, type(tokenizer).__name__)
    return plain_tokenizer


def _ids(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    return ids


def policy_tokenizer(recipe: Recipe, hf_config: PretrainedConfig) -> Any:
    """The tokenizer in policy.path.

    Raises ValueError for a missing tokenizer, and for a model whose embedding has fewer rows than the tokenizer has
    tokens.
    """
    tokenizer = load_tokenizer(recipe.policy.path)
    check_vocabulary(tokenizer, hf_config.get_text_config().vocab_size)
    return tokenizer
