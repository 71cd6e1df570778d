"""The commands `walk` and `lab`, which `multihead` finds by their entry points."""

from multihead.errors import ArgumentError


def parse_whole_numbers(name: str, given: str, example: str) -> tuple[int, ...]:
    """Return the whole numbers of a command line option, which are separated by commas, English or Chinese ones."""
    try:
        return tuple(int(entry) for entry in given.replace("，", ",").split(","))
    except ValueError:
        raise ArgumentError(
            f"{name} is {given!r}, and must be whole numbers with commas between them.", example
        ) from None
