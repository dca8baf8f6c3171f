"""A tiny verifiable-reasoning task, a tokenizer and untrained policies, for one machine without a GPU."""
