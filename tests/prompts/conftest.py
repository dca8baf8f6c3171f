"""A tokenizer of bytes, and a cache of checks for the tests alone."""

import pytest
from byte_tokenizers import byte_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def tokenizer():
    """A token a byte, with a chat template that shows roles."""
    return byte_tokenizer(TEMPLATE)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """What was found out about tests is kept in another folder than the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


@pytest.fixture
def prompts_of(tokenizer, tmp_path):
    """Loads the prompts of rows, which it writes into a file."""
    from layout_rows import load, write  # slow to import

    return lambda rows, verifier="math", file="p.jsonl", **settings: load(
        tokenizer, write(tmp_path, file, rows), verifier, **settings
    )
