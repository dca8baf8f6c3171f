"""One module per part, with `run(setting, record)`, which reports the checks declared in `check_gpu.table`."""
