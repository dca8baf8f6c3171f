"""Which cases of a grid run: ranks compute no others, and each world when a test first asks for it."""

from runner import run_ranks


def chosen(request, parameter):
    """Values of a parameter in the tests of this file that run and use this fixture."""
    tests = [
        item
        for item in request.session.items
        if item.path == request.path and request.fixturename in item.fixturenames and hasattr(item, "callspec")
    ]
    return {item.callspec.params[parameter] for item in tests if parameter in item.callspec.params}


class Worlds(dict):
    """World size -> what each of its ranks answers to `jobs(world_size)`."""

    def __init__(self, target, jobs):
        super().__init__()
        self._target, self._jobs = target, jobs

    def __missing__(self, size):
        self[size] = run_ranks(size, self._target, self._jobs(size))
        return self[size]
