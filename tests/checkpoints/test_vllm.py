"""The exported folder opens in vLLM and continues a prompt as Hugging Face does."""

import json
import os
import subprocess
import sys

import pytest
import torch
from random_policies import FOR_ENGINES, QWEN2_FOR_ENGINES, make
from sampling import sampled

from megatron_scalerl.checkpoints.conversion import Options
from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.checkpoints.to_megatron import to_megatron

PROMPT = [5, 17, 31, 24, 40, 9, 20, 12]
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
          kv_cache_memory_bytes=64 << 20)
sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
answer = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], sampling, use_tqdm=False)
print("tokens", json.dumps(list(answer[0].outputs[0].token_ids)))
"""


FOLDERS = {"llama": FOR_ENGINES, "mistral": FOR_ENGINES, "qwen2": QWEN2_FOR_ENGINES, "qwen2_tied": QWEN2_FOR_ENGINES}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled("exported", FOLDERS, 1))
def test_the_exported_folder_opens_in_vllm(kind, tmp_path):
    model = make(kind, tmp_path / "hf", **FOLDERS[kind])
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", Options(verify=True))
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(8):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "back", json.dumps(PROMPT)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("tokens ")]
    assert json.loads(said[0].removeprefix("tokens ")) == tokens[0, len(PROMPT) :].tolist()
