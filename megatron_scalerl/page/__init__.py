"""The page of a run: one HTML file (`static_page`), or served while the run writes (`server`).

`run_data` collects what the page draws, `groups` and `completions` what its reader shows, `render` makes the page.
None of them imports torch; the run's tokenizer is loaded when the first group is read.
"""
