"""Inference engines, each of which is one vLLM server. `launch` starts and stops the servers.

In the controller's process:

    options.py         makes the server's command line and environment from the recipe
    client.py          the HTTP client of a server
    answers.py         parses a server's responses; completions are parsed in `rollouts.decoder`
    membership.py      records the state of every engine
    watchdog.py        detects a server that hangs
    numerics.py        checks that engine and trainer compute alike
    rounds.py          sends requests to paused engines in rounds, for deterministic runs

In the server's processes:

    server.py          main of the server process
    vllm_plugin.py     middleware, logits processor and worker methods that vLLM loads
    vllm_progress.py   counts tokens in the server process

In both:

    interruption.py    the rules of forced interruption
    certificate.py     the TLS certificate of the servers
"""
