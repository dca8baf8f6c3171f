"""What the part `engine` does: checks of vLLM engines, alone and with a trainer beside them."""
