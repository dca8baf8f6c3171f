"""Environments of the tests of episodes; their processes import this module."""

from pathlib import Path


class Said:
    """Says what the row has, a message for each response, and pays the last one."""

    def reset(self, row):
        self.left = list(row["messages"])
        self.reward = row.get("reward", True)
        return row["text"]

    def step(self, response):
        if not self.left:
            return [], self.reward, True
        return self.left.pop(0), None, False


class Pays:
    """Pays the row's rewards one after another, and fails at an 8."""

    repeated_failure = "wrong"

    def reset(self, row):
        self.left = list(row["rewards"])
        return row["text"]

    def step(self, response):
        if "8" in response.text:
            raise ZeroDivisionError
        reward = self.left.pop(0)
        return "1", reward, not self.left


class Echo:
    """Repeats each response until it has no sum; the verifier scores the last one."""

    async def reset(self, row):
        return row["text"]

    async def step(self, response):
        return response.text, None, not response.text.endswith("=")


class Fails:
    """Fails as the row says: at once, or at the first response with an 8."""

    def reset(self, row):
        self.row = row
        if row["how"] == "reset":
            raise KeyError("no such level")
        return row["text"]

    def step(self, response):
        if self.row["how"] == "raise" and "8" in response.text:
            raise ZeroDivisionError
        if self.row["how"] == "changes":
            told = Path(self.row["file"])
            told.write_text(told.read_text() + "x")
            if len(told.read_text()) == 2:
                raise ConnectionResetError
            return str(min(9, len(told.read_text()))), None, False
        return "1", None, False


class Strict(Fails):
    """The same; a failure that repeats is the policy's."""

    repeated_failure = "wrong"
