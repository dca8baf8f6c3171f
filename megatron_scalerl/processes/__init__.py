"""Child processes: started in a group of their own, tied to their parent, watched, stopped as a whole."""
