"""Makes the Hugging Face folder of a policy in a GGUF file, for architectures that transformers reads from GGUF.

    pip install gguf==0.19.0
    python examples/from_gguf.py MODEL.gguf models/my_policy

The whole policy is in memory twice, in float32. Quantized weights are read back as they were rounded.
"""

import argparse
from pathlib import Path


def parser():
    built = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    built.add_argument("file", type=Path, metavar="MODEL.gguf")
    built.add_argument("out", type=Path, metavar="DIR")
    return built


def main(file, out):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float32", trust_remote_code=False
    )
    del read.config.quantization_config
    policy = AutoModelForCausalLM.from_config(read.config)  # save_pretrained refuses a model that was read from GGUF
    policy.load_state_dict(read.state_dict())
    policy.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(**vars(parser().parse_args()))
