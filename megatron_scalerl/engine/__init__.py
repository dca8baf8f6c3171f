"""Inference engines: one vLLM server each.

In the controller's process:

    process.py         starts a server process, watches and stops it
    options.py         its command line and environment, from the recipe
    client.py          its HTTP client; bodies.py reads the responses
    answers.py         parses them, completions in the decoder processes (`rollouts.decoder`)
    watchdog.py        detects a server that hangs
    numerics.py        checks that it computes what the trainer computes

In the server's processes:

    server.py          main of the server process
    vllm_plugin.py     middleware, logits processor and worker methods that vLLM loads
    vllm_progress.py   counts tokens in the server process
    weight_receiver.py receives weight updates in the workers

In both:

    interruption.py    the rules of forced interruption
"""
