"""Log-probs of a Hugging Face folder, by transformers."""


def of(folder, texts, dtype="float32"):
    """[texts][tokens - 1] log-probs of each token after the first, given those before."""
    import torch
    from transformers import AutoModelForCausalLM

    return of_model(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)), texts)


def of_model(model, texts):
    """The same by a model, as tensors."""
    import torch

    with torch.no_grad():
        rows = [(torch.tensor(text), model(torch.tensor([text])).logits[0].log_softmax(-1)) for text in texts]
    return [logprobs[:-1].gather(1, text[1:, None])[:, 0] for text, logprobs in rows]
