"""Files of JSON lines, as runs and other tools write them."""

import json


def append(path, *rows):
    """Append rows to a file; text is written as it is."""
    with path.open("a") as file:
        for row in rows:
            file.write(row if isinstance(row, str) else json.dumps(row) + "\n")
