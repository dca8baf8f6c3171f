"""Starts, watches and stops the processes of a run.

In the controller's process:

    placement.py             chooses host and devices of each process
    hosts.py                 the run's hosts, and the commands that start a program on another host
    ray_hosts.py             reserves hosts of a Ray cluster and runs programs there
    launcher.py              starts the run's processes: the trainer's ranks (trainer.py) and the engines (engines.py)
    process.py               starts, watches and stops an engine
    agents.py                servers of engines on other hosts, each started by an agent; the socket to all agents

On another host:

    agent.py                 program: runs the host's trainer ranks, or one start of an engine; an agent's messages

On every host:

    local_server.py          an engine's server as a child process
    caches.py                folders for the code that a rank or engine compiles
    control_folder.py        how a program on another host is started and finds the controller
"""
