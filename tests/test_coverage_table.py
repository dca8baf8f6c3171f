"""The coverage table that the CI tier prints sums files by package."""

from coverage_table import row, totals


def entry(lines, all_lines, branches, all_branches):
    keys = ("covered_lines", "num_statements", "covered_branches", "num_branches")
    return {"summary": dict(zip(keys, (lines, all_lines, branches, all_branches)))}


def test_files_are_summed_by_package_and_in_total():
    files = {
        "megatron_scalerl/types.py": entry(9, 10, 0, 0),
        "megatron_scalerl/fit/plot.py": entry(1, 2, 3, 4),
        "/x/megatron_scalerl/fit/data/a.py": entry(10, 20, 30, 40),
    }
    found = totals(files)
    assert found == {"fit": [11, 22, 33, 44], "types": [9, 10, 0, 0], "total": [20, 32, 33, 44]}
    assert list(found)[-1] == "total"
    assert row("fit", *found["fit"]).split() == ["fit", "50%", "of", "22", "lines", "75%", "of", "44", "branches"]
    assert row("types", *found["types"]).split() == ["types", "90%", "of", "10", "lines", "-", "of", "0", "branches"]
