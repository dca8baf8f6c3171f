"""Seconds per decode step of a tiny and of a 1B policy on one GPU, for the planner's assumptions.

    python tools/bench_decode.py [--assumptions FILE] [--toy]

Both engines use CUDA graphs but not torch.compile, which takes minutes. In the planner's model (`plan.engine`) a
step is a fixed time plus reading the weights at a share of the memory bandwidth: the tiny policy measures the former,
the difference to the large one the latter. Prints one JSON line. --assumptions: writes the constants for `plan`.
--toy: narrow policies on a CPU, which has no such graphs.
"""

import asyncio
import secrets
import tempfile
import time
from functools import partial
from pathlib import Path

import harness
from checkout import explained

BATCHES = (1, 64)
SHORT = 16
"""Tokens of the first measurement, whose difference from the second one counts."""
LONG = 144
"""Tokens of the second measurement."""
_KV_BYTES = 4 * 2**30
_RELEASE_S = 5.0
"""For the driver to release the memory of an engine that has exited."""
_SHAPES = {
    "tiny": dict(vocab=512, hidden=512, inner=1024, layers=4, heads=8, groups=2, head_dim=64),
    "1b": dict(vocab=128_256, hidden=2048, inner=8192, layers=16, heads=32, groups=8, head_dim=64),
}
_TOYS = {
    name: shape | dict(vocab=512, hidden=64, inner=128, layers=2, heads=2, groups=2)
    for name, shape in _SHAPES.items()
}
parser = harness.benchmark(
    __doc__,
    assumptions=(Path, "write the constants for plan --assumptions FILE"),
    toy=(False, "narrow policies on the CPU"),
)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    from bench_shapes import used_on_gpu

    from megatron_scalerl.engine.client import SamplingSpec
    from megatron_scalerl.plan.hardware import GIB, GPUS, gpu_of_device
    from megatron_scalerl.processes.child_process import end_with


async def step_seconds(client, batch):
    """Seconds per decode step with `batch` completions, prefill excluded."""

    async def timed(tokens):
        begin = time.perf_counter()
        specs = [SamplingSpec(max_tokens=tokens, seed=i, ignore_eos=True) for i in range(batch)]
        await asyncio.gather(*(client.generate([1, 6, 7, 8], sampling=spec) for spec in specs))
        return time.perf_counter() - begin

    await timed(SHORT)
    short = await timed(SHORT)
    return (await timed(LONG) - short) / (LONG - SHORT)


def write_config(shape, folder):
    """Config and tokenizer of a policy; vLLM makes the weights (`load_format: dummy`)."""
    from random_inputs import llama_settings
    from transformers import LlamaConfig

    from megatron_scalerl.tiny.tokenizer import BOS_ID, EOS_ID, PAD_ID, save_tokenizer

    settings = llama_settings(**shape, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    settings |= dict(max_position_embeddings=4096, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    LlamaConfig(**settings).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


async def measure(folder, *, toy):
    """Both engines, one after the other: ms per step by policy and batch, and the planner's constants."""
    from megatron_scalerl.plan.counting import count, load_family

    seconds = {}
    freed = None
    for name, shape in (_TOYS if toy else _SHAPES).items():
        seconds[name], freed = await _served(write_config(shape, folder / name), toy=toy)
    parameters = count(load_family(folder / "1b"))
    figures = rates(seconds["tiny"], seconds["1b"], parameters, gpu=harness.nvidia_smi("name") or "", freed=freed)
    return {"step_ms": {n: {b: s * 1e3 for b, s in each.items()} for n, each in seconds.items()}, **figures}


async def _served(policy, *, toy):
    """(seconds per step by batch, bytes that the GPU released when the engine had ended)."""
    from random_inputs import recipe_of

    from megatron_scalerl.launch.process import EngineProcess

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(BATCHES)}
    vllm = dict(
        max_model_len=4096, max_num_seqs=64, kv_cache_memory_bytes=_KV_BYTES >> (5 if toy else 0), load_format="dummy"
    )
    vllm |= dict(max_num_batched_tokens=4096)
    vllm |= dict(enforce_eager=True) if toy else dict(compilation_config=graphs)
    recipe = recipe_of(
        policy,
        dtype="bfloat16",
        prompts=dict(path="none.jsonl", max_prompt_tokens=32),
        interruption=dict(thinking_tokens=[1, 200], answer_tokens=8),
        engine=dict(vllm=vllm, start_timeout_s=300),
    )
    engine = EngineProcess.local(recipe, secret=secrets.token_hex(16), log_path=policy / "engine.log")
    try:
        await engine.start()
        found = {batch: await step_seconds(engine.client, batch) for batch in BATCHES}
        occupied = used_on_gpu()
    finally:
        await engine.stop()
    end = time.monotonic() + _RELEASE_S
    while occupied is not None and occupied - (used_on_gpu() or 0) < _KV_BYTES and time.monotonic() < end:
        await asyncio.sleep(0.5)
    after = used_on_gpu()
    return found, None if occupied is None or after is None else occupied - after


def rates(tiny, large, parameters, *, gpu, freed):
    """Measured assumptions of the planner, by name.

    tiny, large: seconds of a decode step by batch size. parameters: of the large policy. freed: device memory (bytes)
    released when the large engine exited.
    """
    key = gpu_of_device(gpu)
    read = 2 * (parameters.total - parameters.embedding)
    rest = large[1] - tiny[1]
    found = {"gpu": gpu, "engine_step_ms": tiny[1] * 1e3}
    if key is not None and rest > 0:
        found["hbm_efficiency"] = read / rest / GPUS[key].memory_bytes_per_second
    if freed is not None:
        found["engine_overhead_gib"] = (freed - 2 * parameters.total - _KV_BYTES) / GIB
    return found


def main(options):
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), toy=options.toy))
    harness.report(options, found)
    if options.assumptions:
        harness.write_constants(
            options.assumptions, [(None, found)], gpu=found["gpu"], source="tools/bench_decode.py"
        )


if __name__ == "__main__":
    end_with(partial(main, OPTIONS))
