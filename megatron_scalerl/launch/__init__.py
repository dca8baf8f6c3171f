"""Starts the processes of a run, watches them, stops them.

In the controller's process:

    placement.py, hosts.py   what runs where; the commands that start a program on another host
    ray_hosts.py             the same from a Ray cluster: reserves nodes, runs programs there
    launcher.py              starts the run's processes: trainer.py its ranks, engines.py its engines
    process.py               starts an engine, watches and stops it
    local_server.py          its server as a child process (also in an agent)
    remote_server.py         its server on another host, behind an agent; agents.py has the socket to all agents
    own_share.py             the CPUs and caches of a rank or engine (also on other hosts)
    race.py                  waits for whichever comes first

On another host:

    host_ranks.py            the host's trainer ranks, in one process
    agent.py                 one process for each start of an engine: starts the server, reports, ends with it

Between both:

    agent_messages.py        what they send
    control_folder.py        the files by which an agent finds the controller
"""
