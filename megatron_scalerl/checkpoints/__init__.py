"""Files that survive a crash, Hugging Face folders, Megatron's checkpoints, and the conversion between both.

atomic_io, jsonl, commit, plain_files    atomic writes, append-only JSON lines, commit files, files of another party
hf_folder, weight_map                    Hugging Face folders and the names of tensors
safe_*                                   opens Megatron's `torch_dist` checkpoints without running code from files:
                                         a pickle is a program, so each part is opened with an allowlist of names
conversion, to_megatron, to_hf, verify   one tensor at a time, in blocks of rows
"""
