"""Which tokens end a completion: the tokenizer's end of sequence, and those that the policy's folder adds.

Instruction-tuned policies end their turns with other tokens than the tokenizer's: Llama 3's generation_config.json
names three. vLLM stops at all of them (vllm/v1/engine/input_processor.py), so warm start, requests and verifier
have to know them too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def end_token_ids(policy: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a completion, the tokenizer's own first; that one is forced where a budget ends.

    policy: Hugging Face folder; its generation_config.json is read, or config.json where there is none. Raises
    ValueError for a tokenizer without an end-of-sequence token and for entries that are not token ids.
    """
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise ValueError(f"policy.path: expected a tokenizer with an end-of-sequence token, found {eos!r}")
    return (eos, *sorted(set(_configured(Path(policy))) - {eos}))


def _configured(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            config = json.loads(file.read_text(encoding="utf8"))
        except ValueError as error:
            raise ValueError(f"{file}: expected JSON, found {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{file}: expected a JSON object, found {type(config).__name__}")
        text = config.get("text_config") or {}
        found = config.get("eos_token_id", text.get("eos_token_id"))
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"{file}: eos_token_id: expected one token id or a list of them, found {found!r}")
        return ids
    return []
