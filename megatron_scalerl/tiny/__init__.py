"""The tiny verifiable-reasoning task, its tokenizer and its untrained policies, for one machine without a GPU."""
