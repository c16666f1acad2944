"""The base of what is raised on purpose: commands turn it into one message and an exit status."""


class OperatingError(Exception):
    """Something from outside is not as it must be; the text is value, cause and remedy."""

    exit_status = 1
    """The command's exit status: 1, or 2 where trying again cannot help (docs/cli.md)."""
    final = False
    """Whether it stays so until somebody changes something; of `exit_status` 2 it always does."""
    remedy = ""
    """The remedy, where all errors of a class have the same and their texts leave it out."""
