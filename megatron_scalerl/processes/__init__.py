"""Child processes of a run: started in a process group, killed with their parent, awaited, stopped as a group.

child_process.py  one process; parent_death.py ties the process to this one
worker_pool.py    processes that answer requests and can be killed; worker.py is the worker's side
signals.py        the end of a run by a signal
logs.py           the log of each process
"""
