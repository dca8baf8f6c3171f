"""The tokens that end a completion: the tokenizer's end-of-sequence token, and the end tokens in the policy's folder.

Instruction-tuned policies also end turns with tokens that are not the tokenizer's: Llama 3's generation_config.json
lists three tokens. vLLM stops at every listed token (vllm/v1/engine/input_processor.py), so warm start, requests and
verifier have to use the whole list as well.
"""

import json
from pathlib import Path
from typing import Any


def end_token_ids(policy: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a completion. The first is the tokenizer's end-of-sequence token, which is forced where a token
    budget ends.

    policy: Hugging Face folder with generation_config.json or, without that file, config.json. Raises ValueError for
    a tokenizer without an end-of-sequence token, for entries that are not token ids, and for ids outside the policy's
    vocabulary.
    """
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise ValueError(f"policy.path: the tokenizer has no end-of-sequence token ({eos!r})")
    config_file = Path(policy) / "config.json"
    generation_file = config_file.with_name("generation_config.json")
    config = _read(config_file)
    text = text_config(policy)
    # as in transformers, config.json is read if the folder has no generation_config.json
    file = config_file
    entry: Any = config.get("eos_token_id", text.get("eos_token_id"))
    if generation_file.is_file():
        file = generation_file
        entry = _read(file).get("eos_token_id")
    ids = entry if isinstance(entry, list) else [entry]
    if entry is None:
        ids = []
    # type() is compared, since isinstance takes JSON's true for an int
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{file}: eos_token_id is {entry!r}; it has to be one token id or a list of token ids")
    rows = text.get("vocab_size")
    if isinstance(rows, int) and any(i >= rows for i in ids):
        raise ValueError(
            f"{file}: eos_token_id is {entry}; every id has to be below vocab_size {rows} of config.json"
        )
    return (eos, *sorted(set(ids) - {eos}))


def text_config(policy: str | Path) -> dict[str, Any]:
    """The content of the policy's config.json, or of the section text_config if present; empty without the file."""
    config = _read(Path(policy) / "config.json")
    return config.get("text_config") or config


def _read(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the file is not valid JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: the file holds a {type(content).__name__}; it has to hold a JSON object")
    return content
