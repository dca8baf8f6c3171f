"""The files beside the weights of an exported Hugging Face folder."""

import json

from megatron_scalerl.checkpoints.hf_writer import add_generation_keys


def test_generation_keys_are_added_to_the_existing_ones(tmp_path):
    """vLLM reads Llama 4's attention temperature there; a folder without the file keeps its special tokens."""
    keys = {"attn_temperature_tuning": True}
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": [3, 4], "_from_model_config": true}')
    add_generation_keys(tmp_path, {})
    assert json.loads(file.read_text()) == {"eos_token_id": [3, 4], "_from_model_config": True}
    add_generation_keys(tmp_path, keys)
    assert json.loads(file.read_text()) == {"eos_token_id": [3, 4], **keys}
    file.unlink()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 2, "pad_token_id": null}}')
    add_generation_keys(tmp_path, keys)
    assert json.loads(file.read_text()) == {"eos_token_id": 2, **keys}
