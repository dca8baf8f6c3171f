"""Starts, watches and stops the processes of a run.

In the controller's process:

    placement.py, hosts.py   the places of processes; the commands that start a program on another host
    ray_hosts.py             the same from a Ray cluster: reserves nodes, runs programs there
    launcher.py              starts the run's processes: trainer.py the ranks, engines.py the engines
    process.py               starts, watches and stops an engine
    agents.py                an engine's server on another host, behind an agent, and the socket to all agents

On another host:

    agent.py                 one program: the host's trainer ranks, or one start of an engine; an agent's messages

On every host:

    local_server.py          an engine's server as a child process
    caches.py                folders for the code that a rank or engine compiles
    control_folder.py        how a program on another host is started and finds the controller
"""
