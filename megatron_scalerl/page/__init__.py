"""The page of a run: one HTML file (`static_page`), or served while the run writes (`server`).

`run_data` collects the data of the charts, `groups` and `completions` collect the text of groups, and `render` makes
the page. No module imports torch; the run's tokenizer is loaded when the first group is read.
"""
