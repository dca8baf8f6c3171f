"""The notebooks of docs/course: executed in order and without errors, small; executed again, they say the same."""

import base64
import json
import os
from pathlib import Path

import pytest

COURSE = Path(__file__).parent.parent / "docs/course"
NOTEBOOKS = ("figure1", "own_loop", "worth_it")
MOST_BYTES = 100_000
"""Of a picture."""


def cells_of(name):
    """The cells with code."""
    notebook = json.loads((COURSE / f"{name}.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell):
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_was_executed_in_order_without_errors(name):
    cells = cells_of(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)  # no warnings, no "command not found"
    pictures = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert all(len(base64.b64decode(picture)) <= MOST_BYTES for picture in pictures)
    wrong = ("not found", "\x1b", str(Path.home()))  # a command, a color, a folder of the machine
    assert not [cell for cell in cells if any(text in printed(cell) for text in wrong)]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_the_same_when_it_is_executed_again(name, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="the extra 'notebooks' is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the extra 'notebooks' is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(COURSE.parent.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    notebook = nbformat.read(COURSE / f"{name}.ipynb", as_version=4)
    place = {"metadata": {"path": str(COURSE)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place, coalesce_streams=True).execute()
    again = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [printed(cell) for cell in again] == [printed(cell) for cell in cells_of(name)]
