"""Child processes of a run: started in a process group, killed with their parent, awaited, stopped as a group.

child_process.py  one process; parent_death.py ties it to this one
worker_pool.py    processes that answer requests and can be killed; worker.py is their side
signals.py        the end of a run by a signal
logs.py           what a process did, and when
"""
