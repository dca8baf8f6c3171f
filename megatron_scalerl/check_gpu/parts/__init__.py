"""One module per part. Each has `run(setting, record)`, which reports the checks that `check_gpu.table` declares."""
