"""Child processes of a run: started in a process group, killed with their parent, awaited, stopped as a group."""
