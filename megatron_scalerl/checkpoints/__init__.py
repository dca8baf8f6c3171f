"""Files that survive a crash: atomic writes, append-only JSON lines, commit files, Hugging Face folders."""
