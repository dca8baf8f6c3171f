"""Files of other tools, made by hand, for the tests of what is read in them."""

STEPS = list(range(10, 110, 10))
RATES = [round(0.1 + 0.5 * step / (step + 40), 4) for step in STEPS]


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
    return path
