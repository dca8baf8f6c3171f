"""Files of JSON lines, as runs and other tools write them."""

import json


def lines(rows):
    """The text of rows."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, rows):
    """The path of a file, which has these rows now."""
    path.write_text(lines(rows))
    return str(path)


def append(path, *rows):
    """Append rows to a file; text is written as it is."""
    with path.open("a") as file:
        for row in rows:
            file.write(row if isinstance(row, str) else lines([row]))
