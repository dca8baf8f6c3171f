"""Inference engines: one vLLM server each.

In the controller's process:

    process.py         starts an engine, watches and stops it
    local_server.py    its server as a child process (also in an agent)
    remote_server.py   its server on another host, behind an agent
    control.py         the socket to the agents
    options.py         the server's command line and environment, from the recipe
    client.py          its HTTP client; bodies.py reads the responses
    answers.py         parses them, completions in the decoder processes (`rollouts.decoder`)
    watchdog.py        detects a server that hangs
    numerics.py        checks that it computes what the trainer computes

On another host, one process for each start of an engine:

    agent.py           its main: starts the server, reports to the controller, ends with it
    log_copy.py        passes the server's output on

Between both:

    agent_messages.py  what they send
    certificate.py     the TLS certificate of the servers
    control_folder.py  the files by which an agent finds the controller

In the server's processes:

    server.py          main of the server process
    vllm_plugin.py     middleware, logits processor and worker methods that vLLM loads
    vllm_progress.py   counts tokens in the server process
    weight_receiver.py receives weight updates in the workers

In both:

    interruption.py    the rules of forced interruption
"""
