"""Random policies for ranks, each made when a test asks for it."""

import pytest


class Policies(dict[str, str]):
    """Kind of a policy -> its folder."""

    def __init__(self, root):
        super().__init__()
        self._root = root

    def __missing__(self, kind):
        import random_policies  # torch and transformers, which quick tests of this folder do not need

        random_policies.make(kind, self._root / kind)
        self[kind] = str(self._root / kind)
        return self[kind]


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    return Policies(tmp_path_factory.mktemp("policies"))
