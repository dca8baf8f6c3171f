"""Files that survive a crash, Hugging Face folders, Megatron's checkpoints, and the conversion between both.

atomic_io, jsonl, commit                 atomic writes, append-only JSON lines, checkpoint folders with a COMMIT file
plain_files                              files that another party may have written: regular files only, no links
hf_folder, weight_map                    Hugging Face folders; which tensors make up a Megatron parameter
safe_*                                   open Megatron's `torch_dist` checkpoints without running code from files: a
                                         pickle is a program, so only names on an allowlist are imported
conversion, to_megatron, to_hf, verify   convert and compare checkpoints one tensor at a time, in blocks of rows
"""
