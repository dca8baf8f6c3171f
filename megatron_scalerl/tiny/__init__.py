"""A tiny verifiable-reasoning task, its tokenizer and untrained policies, for one machine without a GPU."""
