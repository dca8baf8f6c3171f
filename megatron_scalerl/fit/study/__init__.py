"""Studies that reproduce the shipped prior and the benchmark of the methods. Users' commands do not import them."""
