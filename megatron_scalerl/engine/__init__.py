"""Inference engines: vLLM's server with our plugin, the process that runs it, the controller's client."""
