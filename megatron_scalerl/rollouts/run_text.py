"""Shows the tokens of a run as text: loads the run's tokenizer, and decodes with special tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from megatron_scalerl.processes.logs import printable
from megatron_scalerl.recipe.file import read_run_recipe


class RunTokenizer(Protocol):
    """The part of a tokenizer's interface that decoding needs."""

    def decode(self, token_ids: list[int], **settings: bool) -> str:
        """The text of these token ids. settings: as for the method `decode` of a Hugging Face tokenizer."""
        ...


class _FastTokenizer:
    """A tokenizer made from tokenizer.json, without transformers, whose import takes seconds."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False, **_: bool) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def knows(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is not None


def load_tokenizer(run_dir: Path) -> RunTokenizer:
    """The tokenizer of the run's policy, found through RUN_DIR/recipe.yaml.

    Raises ValueError for a missing recipe or policy folder.
    """
    recipe = run_dir / "recipe.yaml"
    if not recipe.is_file():
        raise ValueError(f"{recipe} does not exist; name the folder of a run")
    path = Path(read_run_recipe(run_dir)["policy"]["path"])
    if not path.is_dir():
        raise ValueError(f"{recipe}: policy.path: {path} is no folder, so the tokenizer cannot be loaded")
    # Transformers is not imported if tokenizer.json has all tokens.
    if (path / "tokenizer.json").is_file():
        fast = _FastTokenizer(path / "tokenizer.json")
        if all(map(fast.knows, _added_ids(path / "tokenizer_config.json"))):
            return fast
    # `prompts.tokenizer` imports transformers, which takes seconds, so the import comes after the folder is found.
    from megatron_scalerl.prompts import tokenizer

    return cast(RunTokenizer, tokenizer.load_tokenizer(path))


def _added_ids(config: Path) -> list[int]:
    """Token ids that tokenizer_config.json adds, and that tokenizer.json may lack. Raises ValueError."""
    if not config.is_file():
        return []
    try:
        data = msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
        return [int(token_id) for token_id in data.get("added_tokens_decoder") or {}]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{config}: the tokenizer's configuration is not valid: {error}") from None


def raw_text(tokenizer: RunTokenizer, token_ids: Sequence[int]) -> str:
    """The text of these token ids, special tokens included."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def decode(tokenizer: RunTokenizer, token_ids: Sequence[int]) -> str:
    """The text of these token ids, special tokens included, with control characters except \\n and \\t escaped."""
    return printable(raw_text(tokenizer, token_ids))
