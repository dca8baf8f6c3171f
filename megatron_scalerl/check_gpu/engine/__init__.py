"""The checks of the part `engine`: vLLM engines, alone and together with a trainer."""
