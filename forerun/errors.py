"""The one exception that reaches a user: what is wrong, where, and how to mend it, in one line."""


class ForerunError(Exception):
    """A failure that the user can act on; the command line prints it and exits with status 1."""


class MissingDependencyError(ForerunError):
    """A package that an optional part needs is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed: "
            f"pip install 'forerun[{extra}]'"
        )
