"""Which cases of a grid run: ranks compute no others."""


def chosen(request, parameter):
    """Values of a parameter in the tests of this file that run and use this fixture."""
    tests = [
        item
        for item in request.session.items
        if item.path == request.path and request.fixturename in item.fixturenames and hasattr(item, "callspec")
    ]
    return {item.callspec.params[parameter] for item in tests if parameter in item.callspec.params}
