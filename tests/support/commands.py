"""The command `embertide` in this process: the same output and exit status, a second sooner."""

from typer.testing import CliRunner, Result

from embertide.server.cli.app import app


def embertide(*words: object) -> Result:
    """Run a command; `exit_code`, `stdout` and `stderr` are as of a process without a terminal."""
    done = CliRunner().invoke(app, [*map(str, words)], prog_name="embertide")
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
