"""An environment of the tests of episodes on an engine; its processes import this module."""


class Said:
    """Says what the row has, one message after each response; the verifier scores the last response."""

    def reset(self, row):
        self.left = list(row["messages"])
        return row["text"]

    def step(self, response):
        if not self.left:
            return [], None, True
        return self.left.pop(0), None, False
